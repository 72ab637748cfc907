"""The parts of docs/reference that are made of the code, so that the pages can be read as files:
an overview of each page, and the table of the options.

``python docs/site/reference.py`` writes them into the pages; a test compares.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import griffe

from pgqueue.options import OPTIONS, OPTIONS_OF_WORKER

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
DIRECTIVE = re.compile(r"^::: (pgqueue\.\S+)\n((?: .*\n|\n(?= ))*)", re.MULTILINE)
MEMBERS = re.compile(r"^      members:(.*\n(?: {8}- .*\n)*)", re.MULTILINE)
PART = re.compile(r"(<!-- (overview|options) -->\n).*?(<!-- end -->)", re.DOTALL)
ROLE = re.compile(r":(?:attr|class|exc|func|meth|mod):`~?\.?([^`]+)`")
FIRST = re.compile(r"(.+?\.)(?:\s|$)", re.DOTALL)

package = griffe.load("pgqueue", search_paths=[ROOT])


@dataclass
class Shown:
    """A name that a page shows, and whether its call is for the application."""

    name: str
    object: griffe.Object
    is_constructed: bool = False


def shown_on(page: Path) -> Iterator[Shown]:
    """The names of a page in its order, each class with its members behind it."""
    for path, options in DIRECTIVE.findall(page.read_text("utf-8")):
        found = resolved(path)
        is_constructed = found.is_class and "merge_init_into_class: false" not in options
        yield Shown(path, found, is_constructed)
        members = {**found.inherited_members, **found.members} if found.is_class else {}
        listed = MEMBERS.search(options)
        for name in members if listed is None else re.findall(r"\w+", listed[1]):
            if not name.startswith("_") and name in members:
                member = members[name]
                yield Shown(f"{path}.{name}", member.final_target if member.is_alias else member)


def resolved(path: str) -> Any:
    """The object that a directive names: also a name that ``pgqueue`` hands on."""
    _, *names = path.split(".")
    place = package if names[0] in package.members else package["public"]
    found = place[".".join(names)]
    return found.final_target if found.is_alias else found


def overview_of(page: Path) -> str:
    rows = [
        f"| [`{name}`](#{each.name}) | {first_sentence(each.object)} |"
        for each in shown_on(page)
        for name in [each.name.removeprefix("pgqueue.")]
        if each.object.docstring is not None and not each.object.is_attribute
    ]
    return "\n".join(["", "| name | |", "|---|---|", *rows, "", ""])


def first_sentence(of: griffe.Object) -> str:
    assert of.docstring is not None
    text = " ".join(of.docstring.value.partition("\n\n")[0].split())
    found = FIRST.match(ROLE.sub(r"`\1`", text))
    sentence = text if found is None else found[1]
    return sentence.replace("``", "`").replace("|", r"\|")


def table_of_options() -> str:
    rows = [
        f"| `{each.name}` | {each.metadata['is_for']} | {each.metadata['help']} | {default} |"
        for each in (*OPTIONS, *OPTIONS_OF_WORKER)
        for default in [each.metadata["by_default"] or _shown_default(each.default)]
    ]
    return "\n".join(
        ["", "| option | for | meaning | default |", "|---|---|---|---|", *rows, "", ""]
    )


def _shown_default(default: object) -> str:
    return f"`{default!r}`" if isinstance(default, str | int | bool) else "none"


def written(page: Path) -> str:
    """The text of a page, with its parts as they should be."""
    made = {"overview": lambda: overview_of(page), "options": table_of_options}
    return PART.sub(lambda part: part[1] + made[part[2]]() + part[3], page.read_text("utf-8"))


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(written(each), "utf-8")
