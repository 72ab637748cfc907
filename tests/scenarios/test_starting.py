"""Before a handler starts: its job gives its unique key back, and has not expired."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import worker_tasks
from sqlalchemy import Engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from worker_rig import Rig, endings

from pgqueue import (
    DeadLetter,
    DuplicateJob,
    Job,
    JobAttempt,
    JobContext,
    JobStatus,
    Limit,
    PgQueue,
    Retry,
    Unique,
    Worker,
)
from pgqueue.repository.admit import Admissions
from pgqueue.repository.workers import Paused

HOUR = timedelta(hours=1)
LATE = (
    "UPDATE pgqueue.jobs SET run_at = run_at - interval '2 hours'",
    "UPDATE pgqueue.message_queue SET run_at = run_at - interval '2 hours'",
    "UPDATE pgqueue.waiting_messages SET run_at = run_at - interval '2 hours'",
)


def let_wait(session: Session) -> None:
    """Two hours pass."""
    for statement in LATE:
        session.execute(text(statement))
    session.commit()


def check(engine: Engine) -> None:
    with Session(engine) as session:
        assert PgQueue(engine).check(session) == []


@pytest.mark.parametrize("kind", ["plain", "session", "async", "async session"])
def test_a_job_enqueues_its_successor_under_its_own_key(engine: Engine, kind: str) -> None:
    queue = PgQueue(engine)
    alone = Unique(by=(), until="started")

    @queue.task(name="tests.plain", unique=alone, retry=Retry.never())
    def plain(left: int) -> None:
        if left:
            assert plain.delay(left - 1).is_new

    @queue.task(name="tests.session", unique=alone, retry=Retry.never())
    def in_session(session: Session, left: int) -> None:
        if left:
            assert in_session.enqueue(session, left - 1).is_new

    @queue.task(name="tests.async", unique=alone, retry=Retry.never())
    async def plain_async(left: int) -> None:
        if left:
            assert plain_async.delay(left - 1).is_new

    @queue.task(name="tests.asession", unique=alone, retry=Retry.never())
    async def in_async_session(session: AsyncSession, left: int) -> None:
        if left:
            assert (await in_async_session.enqueue_async(session, left - 1)).is_new

    tasks: dict[str, Callable[..., Any]] = {
        "plain": plain.delay,
        "session": in_session.delay,
        "async": plain_async.delay,
        "async session": in_async_session.delay,
    }
    tasks[kind](5)

    assert endings(Worker(queue)) == {"succeeded": 6}
    check(engine)


def test_the_key_of_a_job_that_waits_in_the_worker_is_still_taken(engine: Engine) -> None:
    queue = PgQueue(engine)
    seen: list[bool] = []

    @queue.task(name="tests.second", unique=Unique(key="second", until="started"))
    def second() -> None: ...

    @queue.task(name="tests.first")
    def first() -> None:
        seen.append(second.delay().is_new)

    first.options(priority=0).delay()
    second.delay()

    assert endings(Worker(queue, concurrency=1)) == {"succeeded": 2}
    assert seen == [False]


def test_a_retry_does_not_take_the_key_back(engine: Engine) -> None:
    queue = PgQueue(engine)

    @queue.task(
        name="tests.retried",
        unique=Unique(by=(), until="started"),
        retry=Retry.constant(timedelta(0)),
        max_attempts=2,
    )
    def retried(session: Session, ctx: JobContext, n: int) -> None:
        if n == ctx.attempt == 1:
            retried.options(delay=HOUR).delay(2)
            raise ValueError

    first = retried.delay(1).id

    assert endings(Worker(queue)) == {"retried": 1, "succeeded": 1}
    assert not retried.delay(3).is_new
    with Session(engine) as session:
        assert session.get_one(Job, first).held_unique_key is None
    check(engine)


@pytest.mark.journey
def test_a_job_whose_worker_is_killed_after_the_start_runs_beside_the_next_one(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        killed = rig.start()
        first = worker_tasks.wait_alone.delay("go")
        rig.until_started(first.id)
        second = worker_tasks.wait_alone.options(delay=HOUR).delay("go")
        assert second.is_new

        killed.kill()
        rig.start()
        rig.until_started(first.id, attempt=2)

        key = "SELECT held_unique_key IS NULL FROM pgqueue.jobs WHERE id = :id"
        assert rig.scalar(key, id=first.id)
        assert not worker_tasks.wait_alone.delay("go").is_new
        with rig.session() as session, session.begin():
            rig.queue.run_now(session, second.id)
        rig.open("go")
        rig.until_ended()
        assert rig.outcomes() == {"succeeded": 2}
        assert rig.check() == []


@pytest.mark.journey
def test_a_job_whose_row_is_locked_starts_later_and_loses_no_attempt(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.open("go")
        job = worker_tasks.wait_alone.delay("go").id
        with rig.session() as session:
            session.execute(select(Job.id).where(Job.id == job).with_for_update())
            worker = rig.start()
            rig.until(lambda: "has locked its row, so it starts later" in worker.log.read_text())
            assert not rig.notes("start")
            session.rollback()

        rig.until_ended(job)
        assert (rig.outcome(job), rig.attempts(job), rig.bad_attempts()) == ("succeeded", 1, [])
        assert worker.terminate() == 0
        assert rig.check() == []


@pytest.mark.parametrize("is_async", [False, True])
def test_a_job_that_was_not_started_in_time_is_cancelled_and_says_why(
    engine: Engine, session: Session, is_async: bool
) -> None:
    queue = PgQueue(engine)
    called: list[int] = []

    @queue.task(name="tests.late", expires_in=HOUR)
    def late(n: int) -> None:
        called.append(n)

    @queue.task(name="tests.alate", expires_in=HOUR)
    async def late_async(n: int) -> None:
        called.append(n)

    task: Any = late_async if is_async else late
    job_id = task.delay(1).id
    let_wait(session)
    task.delay(2)

    assert endings(Worker(queue)) == {"succeeded": 1, "cancelled": 1}
    assert called == [2]
    job = session.get_one(Job, job_id)
    assert (job.outcome, job.attempts, job.started_at) == ("cancelled", 0, None)
    assert job.last_error == "expired: it was not started within its expires_in"
    assert session.get_one(DeadLetter, job_id).outcome == "cancelled"
    assert session.scalars(select(JobAttempt)).all() == []
    check(engine)


def test_a_job_that_waits_for_a_limit_expires_as_if_it_had_not_waited(
    engine: Engine, session: Session
) -> None:
    queue = PgQueue(engine)
    called: list[int] = []

    @queue.task(name="tests.limited", expires_in=HOUR, limit=Limit(1))
    def limited(ctx: JobContext, n: int) -> None:
        assert ctx.meta == {"n": n}
        called.append(n)

    late = limited.options(meta={"n": 1}).delay(1).id
    limited.options(meta={"n": 2}, expires_in=3 * HOUR).delay(2)
    let_wait(session)
    limited.options(meta={"n": 3}).delay(3)

    assert endings(Worker(queue)) == {"succeeded": 2, "cancelled": 1}
    assert sorted(called) == [2, 3]

    assert queue.requeue(session, late)
    session.commit()
    assert endings(Worker(queue)) == {"succeeded": 1}
    assert sorted(called) == [1, 2, 3]
    check(engine)


def test_a_job_that_is_admitted_a_second_time_expires_as_if_it_had_not_waited(
    engine: Engine, session: Session
) -> None:
    queue = PgQueue(engine)

    @queue.task(name="tests.paused", expires_in=HOUR, limit=Limit(1, name="bus"))
    def paused() -> None: ...

    late = paused.delay().id
    let_wait(session)
    Admissions(session.connection()).admit([late], notify=False)
    Admissions(session.connection()).send_back([late], paused=Paused(tasks=["tests.paused"]))
    session.commit()
    assert session.get_one(Job, late).status is JobStatus.BLOCKED

    assert endings(Worker(queue)) == {"cancelled": 1}
    check(engine)


def test_a_job_that_has_started_before_does_not_expire(engine: Engine, session: Session) -> None:
    queue = PgQueue(engine)

    @queue.task(name="tests.again", expires_in=HOUR, retry=Retry.constant(timedelta(0)))
    def again(ctx: JobContext) -> None:
        if ctx.attempt == 1:
            with Session(engine) as other:
                # The next attempt is due at the time that the job has.
                other.execute(text("UPDATE pgqueue.jobs SET attempts = 1"))
                other.commit()
            raise ValueError

    again.delay()
    assert endings(Worker(queue)) == {"retried": 1, "succeeded": 1}

    again.delay()
    session.execute(text("UPDATE pgqueue.jobs SET snoozes = 1 WHERE outcome IS NULL"))
    let_wait(session)
    assert endings(Worker(queue)) == {"retried": 1, "succeeded": 1}


def test_one_enqueue_may_have_its_own_expires_in_or_none(engine: Engine, session: Session) -> None:
    queue = PgQueue(engine)
    metas: list[dict[str, Any]] = []

    @queue.task(name="tests.own", expires_in=HOUR)
    def own(ctx: JobContext, n: int) -> None:
        metas.append({**ctx.meta, "n": n})

    own.options(expires_in=3 * HOUR, meta={"by": "Ada"}).delay(1)
    own.options(expires_in=None).delay(2)
    own.options(expires_in=HOUR).delay(3)
    for n, value in enumerate(("1e999", "-5", '"soon"', "{}"), 4):
        job = own.delay(n)
        meta = f'{{"pgqueue.expires_in": {value}}}'
        set_meta = text("UPDATE pgqueue.jobs SET meta = CAST(:meta AS jsonb) WHERE id = :id")
        session.execute(set_meta, {"meta": meta, "id": job.id})
    let_wait(session)

    assert endings(Worker(queue)) == {"succeeded": 3, "cancelled": 4}
    assert sorted(metas, key=lambda meta: meta["n"]) == [{"by": "Ada", "n": 1}, {"n": 2}, {"n": 4}]


@pytest.mark.journey
def test_a_job_of_a_process_expires_and_gives_its_key_back(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start()
        job = worker_tasks.alone_in_process.delay(2).id
        rig.until(lambda: rig.outcomes() == {"succeeded": 3}, what="it and its successors end")
        assert rig.outcome(job) == "succeeded"


def test_a_job_that_holds_its_key_until_its_end_still_refuses_its_successor(
    engine: Engine,
) -> None:
    queue = PgQueue(engine)
    told: list[str] = []

    @queue.task(name="tests.holds", unique=Unique(by=(), on_conflict="replace"))
    def holds(left: int) -> None:
        try:
            holds.delay(left - 1)
        except DuplicateJob as error:
            told.append(str(error))

    holds.delay(1)

    assert endings(Worker(queue)) == {"succeeded": 1}
    assert "which is running this code" in told[0]
    assert "until='started'" in told[0]
