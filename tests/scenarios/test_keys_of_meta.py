"""Limits, turns and unique keys by a key of meta."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from enqueued_at_once import enqueue_and_run
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from pgqueue import (
    Change,
    Job,
    JobContext,
    Limit,
    OptionError,
    PgQueue,
    Unique,
    UnknownTask,
    Worker,
)

METAS: list[dict[str, Any]] = [
    {"tenant": 'Zo\u00eb \U0001f600 "\\/\x7f\n', "other": 1},
    {"tenant": {"b": [1.0, None], "a": True}},
    {"tenant": "a" * 200},
    {"tenant": None},
    {},
]


class Shop:
    """The application that has the tasks, and one that has none."""

    def __init__(self, engine: Engine) -> None:
        self.queue = PgQueue(engine, queue_limits={"mail": Limit(9, by="meta.tenant")})
        self.other = PgQueue(engine)
        self.tenants: list[Any] = []
        self.locks: dict[Any, threading.Lock] = defaultdict(threading.Lock)
        self.overlaps: list[Any] = []
        task = self.queue.task
        self.mail = task(
            name="mail",
            queue="mail",
            limit=Limit(1, by=("n", "meta.tenant")),
            unique=Unique(by=("meta.tenant", "n")),
        )(self._note)
        self.alone = task(name="alone", limit=Limit(1, by="meta.tenant"))(self._alone)
        self.note = task(name="note", unique=Unique(by=("n", "meta.tenant")))(self._note)
        self.plain = task(name="plain")(self._note)
        self.fair = task(name="fair", fair_by="meta.tenant")(self._note)

    def _note(self, ctx: JobContext, n: int = 1) -> None:
        self.tenants.append(ctx.meta.get("tenant"))

    def _alone(self, ctx: JobContext) -> None:
        """Takes a moment, and notes whether another of the same tenant runs meanwhile."""
        tenant = ctx.meta["tenant"]
        if not self.locks[tenant].acquire(blocking=False):
            self.overlaps.append(tenant)
            return
        time.sleep(0.002)
        self.locks[tenant].release()


@pytest.fixture
def shop(engine: Engine) -> Iterator[Shop]:
    shop = Shop(engine)
    yield shop
    with Session(engine) as session:
        assert shop.queue.check(session) == []


@pytest.fixture
def declared(shop: Shop) -> Shop:
    Worker(shop.queue).run_until_empty()
    return shop


def test_the_values_of_a_key_of_meta_take_turns(shop: Shop, session: Session) -> None:
    for tenant in (7, 7, 7, 8, None):
        shop.fair.options(meta={} if tenant is None else {"tenant": tenant}).enqueue(session)
    session.commit()

    assert Worker(shop.queue, concurrency=1).run_until_empty() == {"succeeded": 5}
    assert set(shop.tenants[:3]) == {7, 8, None}


def test_a_limit_by_meta_holds_while_sql_and_python_enqueue_at_once(
    declared: Shop, engine: Engine
) -> None:
    by_name = (
        "SELECT pgqueue.enqueue('alone', meta => jsonb_build_object('tenant', CAST(:n AS int)))"
    )

    def in_python(connection: Connection, n: int) -> None:
        declared.alone.options(meta={"tenant": n % 3}).enqueue(connection)

    def in_sql(connection: Connection, n: int) -> None:
        connection.execute(text(by_name), {"n": n % 3})

    enqueue_and_run(declared.queue, engine, in_python, in_sql)

    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM pgqueue.jobs")) == 160
    assert declared.overlaps == []


@pytest.mark.parametrize("meta", METAS)
def test_every_way_of_enqueuing_makes_the_same_keys(
    declared: Shop, session: Session, meta: dict[str, Any]
) -> None:
    mail = declared.mail.options(meta=meta)

    def keys_of(enqueue: Callable[[], int]) -> tuple[str | None, str | None]:
        job = session.get_one(Job, enqueue())
        keys = job.unique_key, job.limit_keys
        session.rollback()
        return keys

    def by_flush() -> int:
        session.add(job := mail.job())
        session.flush()
        return job.id

    ways: list[Callable[[], int]] = [
        lambda: mail.enqueue(session).id,
        lambda: mail.enqueue_many(session, [()])[0],
        lambda: declared.queue.enqueue_all(session, [mail.job()])[0],
        by_flush,
        lambda: declared.other.enqueue_by_name(session, "mail", {}, meta=meta),
    ]
    found = [keys_of(way) for way in ways]

    assert len(set(found)) == 1
    assert mail.enqueue(session).id == mail.enqueue(session).id


def test_jobs_of_two_values_of_meta_are_no_duplicates(shop: Shop, session: Session) -> None:
    first = shop.mail.options(meta={"tenant": 7}).enqueue(session)

    assert shop.mail.options(meta={"tenant": 8}).enqueue(session).is_new
    assert shop.mail.options(meta={"tenant": 7, "more": 1}).enqueue(session).id == first.id


def test_a_job_of_an_undeclared_task_gets_its_keys_from_its_meta(
    shop: Shop, session: Session
) -> None:
    job_id = shop.other.enqueue_by_name(
        session, "mail", {"n": 1}, queue="mail", meta={"tenant": "A"}
    )
    session.commit()

    Worker(shop.queue, queues=["none"]).run_until_empty()

    job = session.get_one(Job, job_id)
    assert job.limit_keys == 'mail:n+meta.tenant [1,"A"]\nqueue:mail:meta.tenant ["A"]'


def test_a_key_of_meta_that_makes_a_key_cannot_change(shop: Shop, session: Session) -> None:
    limited = shop.alone.options(meta={"tenant": 7}).enqueue(session).id
    unique = shop.note.options(meta={"tenant": 7}).enqueue(session).id

    of_queue = shop.plain.options(meta={"tenant": 7}, queue="mail").enqueue(session).id

    for job_id in (limited, unique, of_queue):
        with pytest.raises(
            OptionError, match=f"job {job_id} counts .* by meta.tenant, so this key"
        ):
            shop.queue.change(session, job_id, meta={"tenant": 8})
        assert shop.queue.change(session, job_id, meta={"by": "Ada"}) is Change.CHANGED
    assert shop.queue.change(session, unique, args={"n": 2}) is Change.CHANGED
    assert shop.note.options(meta={"tenant": 7, "by": 1}).enqueue(session, 2).id == unique
    assert shop.other.change(session, unique, timeout=timedelta(1)) is Change.CHANGED
    with pytest.raises(UnknownTask):
        shop.other.change(session, unique, meta={"tenant": 8})


def test_one_value_of_meta_is_paused(shop: Shop, session: Session) -> None:
    shop.queue.pause_key(session, "fair:meta.tenant:fair", 7)
    for tenant in (7, 8):
        shop.fair.options(meta={"tenant": tenant}).enqueue(session)
    session.commit()

    Worker(shop.queue).run_until_empty()

    assert shop.tenants == [8]
