"""What holds for every route: limited users, and secrets."""

import re
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session
from visitor import SECRET, Visitor

from pgqueue import Limit, PgQueue, Retry, Worker
from pgqueue.dashboard.pages import ROUTES
from pgqueue.dashboard.routing import Route
from pgqueue.repository.error_groups import in_hex
from pgqueue.repository.task_minutes import ENDED, TaskMinutes
from pgqueue.tables import WorkerProcess
from pgqueue.testing.databases import fresh_database

MARK = "zebra"
"""In every text of the other tenant: of jobs, and the name of its queue, task and schedule."""
CARD = "4012888888881881"
WORKER = UUID("6f9619ff-8b86-d011-b42d-00c04fc964ff")
THEIRS = (2, 3, 4)
"""The jobs of the other tenant: failed, succeeded and pending."""
PARAMETER = re.compile(r"<(?:[^:>]*:)?(\w+)>")
PAGES = [route for route in ROUTES if route.method == "GET"]
FORMS = [route for route in ROUTES if route.method == "POST" and route.answer.__name__ != "choose"]


def endpoint(route: Route) -> str:
    return route.endpoint


@pytest.fixture(scope="module")
def shared_engine(server_url: str, template_url: str) -> Iterator[Engine]:
    """A database with jobs of two tenants, which no test here may change."""
    with fresh_database(server_url, template_url=template_url) as url:
        engine = create_engine(url)
        fill(application(engine))
        yield engine
        engine.dispose()


def application(engine: Engine) -> PgQueue:
    queue = PgQueue(engine, secret=SECRET)

    @queue.task(
        name="pay",
        secret_args=["card"],
        max_attempts=2,
        retry=Retry.never(),
        limit=Limit(5, by="who"),
    )
    def pay(who: str, card: str) -> dict[str, str]:
        if who == "nobody":
            return {"paid": who}
        raise ValueError(f"{who} cannot pay with {card}")

    @queue.schedule("0 4 * * *", name=MARK, args=("nobody", CARD), queue=MARK)
    @queue.task(name="report")
    def report(who: str, card: str) -> None: ...

    return queue


def fill(queue: PgQueue) -> None:
    """Job 1 is ours, the others are those of the other tenant."""
    pay = queue.tasks["pay"]
    theirs = pay.options(queue=MARK, tags=[MARK, "theirs"], meta={"of": MARK})
    with queue.session() as session, session.begin():
        pay.options(queue="ours", tags=["us"]).enqueue(session, "us", CARD)
        with queue.batch(session, name=MARK):
            theirs.enqueue(session, MARK, CARD)
            theirs.enqueue(session, "nobody", CARD)
    Worker(queue, ["ours", MARK]).run_until_empty(timeout=60)
    Visitor(queue, user=MARK).post("/actions/requeue", {"action": "requeue", "id": "2"})
    Worker(queue, ["ours", MARK]).run_until_empty(timeout=60)
    with queue.session() as session, session.begin():
        theirs.options(unique_key=MARK).enqueue(session, MARK, CARD)
        queue.pause(session, MARK)
        queue.pause_task(session, MARK)
        session.add(
            WorkerProcess(id=WORKER, hostname="h", pid=1, backend_pid=1, slots=1, queues=[MARK])
        )
        minute = {"minute": int(time.time() // 60), "task": MARK, "ran": [], "waited": []}
        TaskMinutes(session).add([dict.fromkeys(ENDED, 1) | minute])


def address_of(route: Route, engine: Engine, *, job_id: int) -> str:
    """An address of a route; its ids are those of the other tenant."""
    with Session(engine) as session:
        fingerprints = "SELECT fingerprint FROM pgqueue.error_groups ORDER BY job_id DESC LIMIT 1"
        values = {
            "job_id": job_id,
            "batch_id": 1,
            "action_id": 1,
            "fingerprint": session.execute(text(fingerprints)).scalar_one(),
            "name": "pay",
        }
    path = PARAMETER.sub(
        lambda found: str(values[found[1]]), route.rule.replace("int(signed=True)", "int")
    )
    return f"{path}?task=pay&tried={job_id}&copy={job_id}" if "<" in route.rule else path


def jobs_of(route: Route) -> tuple[int, ...]:
    """The jobs for which a page has different addresses."""
    return THEIRS if "<" in route.rule else THEIRS[:1]


QUERIES = ("", "q=tag:theirs", "q=task:pay", "q=status:failed", "q=error:pay", "span=all")


@pytest.mark.parametrize("scope", [{"queues": {"ours"}}, {"tags": {"us"}}], ids=str)
@pytest.mark.parametrize("route", PAGES, ids=endpoint)
def test_a_limited_user_sees_nothing_of_other_jobs(
    shared_engine: Engine, route: Route, scope: Any
) -> None:
    visitor = Visitor(application(shared_engine), **scope)
    for job_id in jobs_of(route):
        address = address_of(route, shared_engine, job_id=job_id)
        for query in QUERIES if job_id == THEIRS[0] else QUERIES[:1]:
            if query.startswith("span") and route.endpoint != "failures":
                continue
            response = visitor.get(f"{address}{'&' if '?' in address else '?'}{query}")
            assert MARK not in response.text, f"{address} {query}"
            assert response.status_code < 500


def test_a_limited_user_sees_the_own_jobs(shared_engine: Engine) -> None:
    queue = application(shared_engine)
    for visitor in (Visitor(queue, queues={"ours"}), Visitor(queue, tags={"us"})):
        for address in ("/jobs", "/live", "/failures", "/jobs.csv", "/jobs/1"):
            assert "pay" in visitor.get(address).text
        assert "Failed 1" in visitor.text("/jobs")
        assert "1 job of pay failed" in visitor.text("/")
        # They count jobs of all users.
        assert "Attempts that ended" not in visitor.text("/")
        assert "Limits" not in visitor.text("/queues")


def test_a_limited_user_finds_no_type_of_an_error_by_its_fingerprint(shared_engine: Engine) -> None:
    with Session(shared_engine) as session:
        fingerprint = session.execute(text("SELECT min(fingerprint) FROM pgqueue.error_groups"))
        line = f"error:{in_hex(fingerprint.scalar_one())}"
    queue, query = application(shared_engine), {"action": "requeue", "q": line}

    def preview(**scope: Any) -> str:
        visitor = Visitor(queue, **scope)
        return str(visitor.get("/actions/preview", query_string=query).text)

    assert "ValueError" in preview()
    assert "ValueError" not in preview(queues={"none"})


@pytest.mark.parametrize("scope", [{"queues": {"ours"}}, {"tags": {"us"}}], ids=str)
@pytest.mark.parametrize("route", FORMS, ids=endpoint)
def test_a_limited_user_changes_nothing_of_other_jobs(
    shared_engine: Engine, route: Route, scope: Any
) -> None:
    visitor = Visitor(application(shared_engine), **scope)
    before = rows_of_the_other(shared_engine)
    for job_id in THEIRS:
        fields = {
            "id": str(job_id),
            "action": "cancel" if "cancel" in route.rule else "requeue",
            "queue": MARK,
            "task": "pay",
            "schedule": MARK,
            "worker": str(WORKER),
            "limit": "pay:who",
            "key": MARK,
            "capacity": "1",
            "priority": "9",
        }
        visitor.post(address_of(route, shared_engine, job_id=job_id), fields)
        visitor.post(address_of(route, shared_engine, job_id=job_id), {**fields, "q": "tag:theirs"})
    assert rows_of_the_other(shared_engine) == before


def rows_of_the_other(engine: Engine) -> list[object]:
    queries = (
        "SELECT to_jsonb(j) FROM pgqueue.jobs j WHERE id IN (2, 3, 4) ORDER BY id",
        "SELECT to_jsonb(m) FROM pgqueue.message_queue m WHERE target_id IN (2, 3, 4)",
        f"SELECT to_jsonb(q) FROM pgqueue.queues q WHERE name = '{MARK}'",
        "SELECT to_jsonb(p) FROM pgqueue.paused_tasks p",
        "SELECT to_jsonb(l) FROM pgqueue.limits l ORDER BY name",
        "SELECT to_jsonb(s) FROM pgqueue.schedules s",
        "SELECT to_jsonb(w) FROM pgqueue.workers w",
        "SELECT to_jsonb(e) - 'attempts' FROM pgqueue.error_groups e ORDER BY fingerprint",
    )
    with engine.connect() as connection:
        return [connection.execute(text(query)).scalars().all() for query in queries]


@pytest.mark.parametrize("route", PAGES, ids=endpoint)
def test_a_secret_never_leaves_the_server(shared_engine: Engine, route: Route) -> None:
    visitor = Visitor(application(shared_engine))
    for job_id in jobs_of(route):
        response = visitor.get(address_of(route, shared_engine, job_id=job_id))
        assert response.status_code < 500
        assert CARD not in response.text
