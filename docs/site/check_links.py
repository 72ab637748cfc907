"""Check the built site: every link has its target, and no page loads a file of another host.

``zensical build --strict`` checks the links between Markdown pages. This checks what a browser is
given, so also the reference and the theme.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"img": "src", "link": "href", "script": "src"}


class Page(HTMLParser):
    """The names in one page that a link may end with, its links, and the files that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.names |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])


def problems_of(site: Path) -> list[str]:
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    problems = []
    for path, page in pages.items():
        shown = path.relative_to(site)
        problems += [f"{shown} loads {file}" for file in page.loaded if urlsplit(file).netloc]
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            name = unquote(parts.fragment)
            if not target.is_file() or (
                name and target in pages and name not in pages[target].names
            ):
                problems.append(f"{shown}: no target of {link}")
    return problems


if __name__ == "__main__":
    found = problems_of(Path(sys.argv[1]).resolve())
    print("\n".join(found) or "Every link of the site has its target.")
    sys.exit(bool(found))
