"""Keys that are made from arguments: they need the right of arguments, and are masked as these."""

import json

import pytest
from sqlalchemy import Engine, text
from visitor import SECRET, Visitor

from pgqueue import Limit, PgQueue, Unique
from pgqueue.dashboard import RIGHTS
from pgqueue.dashboard.pages import ROUTES
from pgqueue.operations import Selection
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.limits import Limits
from pgqueue.repository.operator_actions import LogEntry, OperatorActions

ACCOUNT = "acme-4711"
KEY = f'accounts ["{ACCOUNT}"]'
TOKEN = "t0ken-of-acme"
LESS = RIGHTS - {"view_arguments"}


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    """Job 1 holds the place of its account, job 2 waits for it, and job 4 has taken 3's key."""
    queue = PgQueue(engine, secret=SECRET)
    limit, unique = Limit(1, by="account", name="accounts"), Unique(key=lambda account: account)

    @queue.task(name="pay", limit=limit, secret_args=["token"])
    def pay(account: str, token: str) -> None: ...

    @queue.task(name="report", unique=unique)
    def report(account: str) -> None: ...

    with queue.session() as session, session.begin():
        for _ in range(2):
            pay.enqueue(session, ACCOUNT, "another token")
        cancelled = report.enqueue(session, ACCOUNT)
        session.flush()
        queue.cancel(session, cancelled.id)
        report.enqueue(session, ACCOUNT)
        pay.options(unique_key=f"of {TOKEN}").enqueue(session, TOKEN, TOKEN)
        Limits(session).declare(queue.limited.limits.values())
        place = "INSERT INTO pgqueue.limit_places (limit_key, job_id) VALUES (:key, 1)"
        session.execute(text(place), {"key": KEY})
        log = OperatorActions(session)
        for which in (JobFilter(limit_key=KEY), JobFilter(task="report", unique_key=ACCOUNT)):
            target = Selection.of(which).target
            log.add(LogEntry(actor="ann", action="cancel", target=target))
    ann = Visitor(queue)
    ann.post("/queues/pause-key", {"limit": "accounts", "key": ACCOUNT})
    ann.post("/queues/limit", {"limit": "accounts", "key": ACCOUNT, "capacity": "7"})
    return queue


ADDRESSES = [
    *(route.rule for route in ROUTES if route.method == "GET" and "<" not in route.rule),
    *(f"/jobs/{id}" for id in (1, 2, 3, 4)),
    *(f"/log/{id}" for id in (1, 2, 3, 4)),
    "/tasks/pay",
]


def test_no_page_has_a_key_without_the_right_to_see_arguments(queue: PgQueue) -> None:
    poor = Visitor(queue, LESS)
    pages = {address: poor.get(address).text for address in ADDRESSES}
    pages["requeue"] = poor.post("/jobs/3/requeue").text

    assert [address for address, page in pages.items() if ACCOUNT in page] == []
    assert "Set the capacity" not in poor.text(f"/queues?limit={KEY}")
    assert "has its unique key" in pages["requeue"]
    assert "accounts ***" in poor.text("/jobs/1")
    assert "set limit limit accounts ***" in poor.text("/log")
    seen = Visitor(queue)
    assert all(KEY in seen.text(address) for address in ("/jobs/1", "/log", "/queues"))


@pytest.mark.parametrize("line", [f"limit:{json.dumps(KEY)}", f"key:{ACCOUNT}"])
def test_a_filter_by_a_key_needs_the_right_to_see_arguments(queue: PgQueue, line: str) -> None:
    poor, query = Visitor(queue, LESS), {"q": line, "action": "cancel"}

    for address in ("/jobs", "/jobs.csv", "/actions/preview"):
        assert poor.get(address, query_string=query).status_code == 403
    assert poor.post("/actions/cancel", query).status_code == 403
    assert Visitor(queue).get("/jobs", query_string=query).status_code == 200


def test_the_name_of_a_limit_is_no_argument(queue: PgQueue) -> None:
    assert Visitor(queue, LESS).get("/jobs?q=limit:accounts").status_code == 200


def test_a_key_that_quotes_a_secret_is_masked(queue: PgQueue) -> None:
    assert TOKEN not in Visitor(queue).get("/jobs/5").text
