"""A user of the dashboard: a test client that sends forms as a browser does."""

import re
from collections.abc import Collection, Mapping
from html import unescape
from typing import Any

from werkzeug.test import Client, TestResponse

from pgqueue import PgQueue
from pgqueue.dashboard import RIGHTS, Access

SECRET = "of the tests"
TOKEN = re.compile(r'name="csrf" value="([^"]+)"')
SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}


class Visitor:
    """Looks at the pages of a queue with some rights."""

    def __init__(
        self,
        queue: PgQueue,
        rights: Collection[str] = RIGHTS,
        *,
        queues: Collection[str] | None = None,
        tags: Collection[str] | None = None,
        user: str = "ann",
    ) -> None:
        access = Access(user=user, rights=rights, queues=queues, tags=tags)
        self.dashboard = queue.dashboard(authorize=lambda request: access, secret=SECRET)
        self.client = Client(self.dashboard.wsgi)
        self._token = ""

    def get(self, address: str, **options: Any) -> TestResponse:
        """A page; keeps the token of its form."""
        response = self.client.get(address, **options)
        if found := TOKEN.search(response.text):
            self._token = found[1]
        return response

    def post(
        self, address: str, fields: Mapping[str, Any] | None = None, **options: Any
    ) -> TestResponse:
        """Send a form with the token of the last page."""
        if not self._token:
            self.get("/you")
        form = {"csrf": self._token, **(fields or {})}
        return self.client.post(address, data=form, headers=SAME_ORIGIN, **options)

    def text(self, address: str, *, status: int = 200) -> str:
        """What a reader sees of a page, its tags removed and its spaces joined."""
        response = self.get(address)
        assert response.status_code == status, response.text[-2000:]
        return words_of(response.text)


def words_of(html: str) -> str:
    """The text of a page without its tags, in one line."""
    body = html.partition("<body")[2] or html
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())
