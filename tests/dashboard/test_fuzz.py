"""Each route with odd input: it is refused or answered, and no page fails."""

import json
import random
import re
from collections.abc import Iterator
from io import BytesIO
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import Engine
from visitor import SAME_ORIGIN, SECRET, TOKEN, Visitor
from werkzeug.test import EnvironBuilder

from pgqueue import Limit, PgQueue, Secret, Worker
from pgqueue.dashboard.pages import ROUTES
from pgqueue.dashboard.routing import Route

SEED = 44
REQUESTS = 12
"""Of each route."""
PARAMETER = re.compile(r"<(?:[^:>]*:)?(\w+)>")
HARD = (
    *("\0", "a\0b", "9" * 30, "9" * 5000, str(2**63), str(-(2**63) - 1), "-1", "1e400", "NaN"),
    *("a" * 20_001, "[" * 1000, '"\\ud800"', '"\\u0000"', "[1e999]", "9999-12-31T23:59:59-14:00"),
)
"""What has made a page fail before, here or elsewhere."""
ODD = (
    *(5 * HARD),
    *("", " ", "0", "-1", "-0", "1.5", "1e400", "NaN", "Infinity", "True", "\u0663", "\u00b2"),
    *("+1", "1_000", "0x10", "9" * 30, "9" * 5000),
    *map(str, (2**31, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1)),
    *(
        "\0",
        "a\0b",
        "\r\nX-Odd: 1",
        "\t",
        "\x1b[31m",
        "\x7f",
        "\u202e",
        "\ufffe",
        "\U0001f3f3" * 300,
    ),
    *("a" * 999, "a" * 1001, "a" * 20_001, "(" * 1000, "[" * 1000, '{"a":' * 1000),
    *("'", '"', "\\", "{", "[]", "null", '{"a": [1, null]}', '"\\ud800"', '"\\u0000"', "[1e999]"),
    *("..", ".", "/", "//", "//evil.example", "https://evil.example", "../../etc/passwd"),
    *("~", "~00", "~ff", "%", "%00", "%ff", "%s", "$1", ":a", "1 OR 1=1", "; DROP TABLE jobs"),
    *(
        "<script>",
        "{{ 7 * 7 }}",
        "javascript:1",
        "task:pay arg.who:1",
        'arg.who:"\\"',
        "arg.a:1e999",
    ),
    *("status:failed", "status:due status:failed", "error:0000000000000000", "batch:1", "key:x"),
    *("created:>2h", "created:>99999999d", "created:>0001-01-01", "took:>1d", "before:1 after:9"),
    *("limit:accounts", 'limit:"accounts [7]"', "tag:\U0001f3f3", "a,b,,\0,", "1,2,3", "1;2"),
    *("2026-11-25 17:30", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00+14:00", "24:00"),
    *("7.1.2.3", "0.0.0.0", "-9223372036854775809.0.0.0", "5.99999999999999999999.1.1"),
    *("requeue", "cancel", "kill", "run_now", "change", "yes", "off", "dark", "hour", "all"),
)
PARAMETERS = {
    "q": "status:failed", "span": "hour", "before": "9", "word": "task", "value": "pay",
    "task": "pay", "tried": "2", "copy": "2", "actor": "ann", "action": "requeue", "message": "",
    "unfinished": "no", "limit": "accounts",
}  # fmt: skip
FIELDS = {
    "action": "requeue", "q": "", "id": "2", "go_on": "", "of": "1", "spread": "5", "copy": "2",
    "reason": "calm", "back": "/jobs", "task": "pay", "queue": "mail", "schedule": "nightly",
    "limit": "accounts", "key": "7", "capacity": "3", "hours": "2", "priority": "5", "tags": "a, b",
    "worker": "01234567-89ab-cdef-0123-456789abcdef", "run_at": "2027-11-25 17:30",
    "unique_key": "", "live": "on", "theme": "dark", "arg.who": '"us"', "arg.card": '"4711"',
    "arg.sums": "[1, 2]",
}  # fmt: skip
"""Each parameter of an address, and each field of a form, with a value that it may have."""
HEADERS = ("Cookie", "Authorization", "Origin", "HX-Request", "X-Forwarded-For", "Content-Type")


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    """Jobs that have failed, succeeded, wait and are blocked; a batch, a schedule, a log."""
    queue = PgQueue(engine, secret=SECRET)

    @queue.schedule("0 4 * * *", name="nightly", args=("nobody", "4711"))
    @queue.task(name="pay", max_attempts=1, limit=Limit(5, by="who", name="accounts"))
    def pay(who: str, card: Secret[str], sums: list[int] | None = None) -> str:
        if who == "them":
            raise ValueError(f"{who} cannot pay")
        return who

    with queue.session() as session, session.begin(), queue.batch(session, name="all"):
        for who in ("us", "them", "them"):
            pay.options(tags=["a"]).enqueue(session, who, "4711")
    Worker(queue).run_until_empty(timeout=60)
    with queue.session() as session, session.begin():
        pay.options(unique_key="us", queue="mail").enqueue(session, "us", "4711", [1])
        queue.pause(session, "mail")
    Visitor(queue).post("/actions/cancel", {"action": "cancel", "q": "status:pending tag:none"})
    return queue


def path_of(route: Route, chance: random.Random) -> str:
    """An address of a route; one in two has an odd part."""
    values = {"job_id": "2", "batch_id": "1", "action_id": "1", "fingerprint": "5", "name": "pay"}

    def part(found: re.Match[str]) -> str:
        is_odd = chance.random() < 0.5
        return quote(chance.choice(ODD) if is_odd else values[found[1]], safe="")

    return PARAMETER.sub(part, route.rule.replace("int(signed=True)", "int"))


def requests_of(route: Route, token: str, seen: str) -> Iterator[EnvironBuilder]:
    chance = random.Random(f"{SEED} {route.endpoint}")
    for _ in range(REQUESTS):
        given: dict[str, Any] = dict(PARAMETERS)
        if route.method == "POST":
            given = {**FIELDS, "seen": seen}
        for name in chance.sample([*given], 3):
            given[name] = chance.choice(ODD)
        for name in chance.sample([*given], len(given) // 4):
            del given[name]
        if chance.random() < 0.2:
            given[chance.choice([*given])] = [chance.choice(ODD) for _ in range(3)]
        headers = dict(SAME_ORIGIN)
        if chance.random() < 0.2:
            odd = chance.choice(ODD).encode(errors="replace")[:500].decode("latin-1")
            headers[chance.choice(HEADERS)] = re.sub(r"[\r\n\0]", " ", odd)
        options: dict[str, Any] = {"path": path_of(route, chance), "headers": headers}
        if route.method == "GET":
            options["query_string"] = given
        elif chance.random() < 0.1:
            options["data"] = {**given, "csrf": token, "id": (BytesIO(b"\xff\0"), "a.txt")}
        elif chance.random() < 0.1:
            options |= {"data": json.dumps(given), "content_type": "application/json"}
        else:
            options["data"] = {**given, "csrf": token}
        yield EnvironBuilder(method=route.method, **options)


def test_no_request_makes_a_page_fail(queue: PgQueue) -> None:
    visitor, failed = Visitor(queue), []
    token = TOKEN.search(visitor.get("/you").text)[1]  # type: ignore[index]
    for route in ROUTES:
        found = re.search(r'name="seen" value="(\w+)"', visitor.get("/jobs/2/edit").text)
        for request in requests_of(route, token, found[1] if found else ""):
            environ = request.get_environ()
            answer = visitor.client.open(environ)
            if answer.status_code >= 500:
                failed.append((request.method, request.path, answer.status_code, given(request)))
    assert failed == []


def given(request: EnvironBuilder) -> Any:
    return request.args if request.method == "GET" else request.form or request.input_stream
