"""The dashboard as a server has it, and the pages to which its links lead."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from threading import Thread
from typing import Any

from waitress.server import create_server
from werkzeug.routing import Map, Rule
from werkzeug.test import Client

from pgqueue import PgQueue
from pgqueue.dashboard import RIGHTS, Access, Dashboard
from pgqueue.dashboard.pages import ROUTES
from pgqueue.dashboard.routing import CONVERTERS

LINK = re.compile(r'<a [^>]*href="([^"#]+)')
MOST_OF_A_KIND = 2
PAGES = Map(
    [Rule(each.rule, endpoint=each.endpoint) for each in ROUTES if each.method == "GET"],
    converters=CONVERTERS,
    strict_slashes=False,
)


@dataclass(frozen=True, slots=True)
class Site:
    root: str
    """The address of the server, without a slash at the end."""
    pages: dict[str, list[str]]
    """Some pages of each endpoint; none of one that is a file to download."""

    @property
    def addresses(self) -> list[str]:
        return [address for addresses in self.pages.values() for address in addresses]


@contextmanager
def served(queue: PgQueue, port: int = 0) -> Iterator[Site]:
    """Serve the dashboard of a queue in a thread of this process."""
    access = Access(user="ann@shop.example", rights=RIGHTS)
    dashboard = queue.dashboard(authorize=lambda request: access, environment="production")
    server: Any = create_server(dashboard.wsgi, host="127.0.0.1", port=port, threads=4)
    thread = Thread(target=server.run)
    thread.start()
    try:
        port = server.socket.getsockname()[1]
        yield Site(f"http://127.0.0.1:{port}", _linked_pages(dashboard))
    finally:
        server.close()
        thread.join(60)


def _linked_pages(dashboard: Dashboard) -> dict[str, list[str]]:
    """Follow the links from the first page, a few of each endpoint."""
    client, pages = Client(dashboard.wsgi), PAGES.bind("localhost")
    found: dict[str, list[str]] = {}
    links = ["/"]
    for address in links:  # which grows
        path, _, query = address.partition("?")
        assert pages.test(path), f"a page links to {address}, which is none"
        known = found.setdefault(pages.match(path)[0], [])
        if address in known or len(known) == MOST_OF_A_KIND:
            continue
        response = client.get(path, query_string=query)
        assert response.status_code == 200, f"a page links to {address}: {response.status}"
        if response.mimetype != "text/html":
            continue
        known.append(address)
        links += [unescape(link) for link in LINK.findall(response.text) if link.startswith("/")]
    return found
