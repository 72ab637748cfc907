"""Every name and signature that users were promised, used as they would."""

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, create_engine, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pgqueue import (
    Cancel,
    ClaimedJob,
    DeadLetter,
    Discard,
    DuplicateJob,
    Job,
    JobAttempt,
    JobContext,
    JobStatus,
    Lease,
    MessageQueue,
    PgQueue,
    PgQueueError,
    Retry,
    Snooze,
    Worker,
)


@pytest.fixture
def queue(database_url: str) -> Iterator[PgQueue]:
    queue = PgQueue(database_url)
    with queue.session() as session, session.begin():
        session.execute(text("CREATE TABLE sent (who int)"))
    yield queue
    queue.engine.dispose()


def test_a_queue_is_made_from_a_url_an_engine_a_sessionmaker_or_nothing(database_url: str) -> None:
    engine = create_engine(database_url)
    later = PgQueue()
    later.bind(engine)

    queues = [PgQueue(database_url), PgQueue(engine), PgQueue(sessionmaker(engine)), later]

    for queue in queues:
        assert isinstance(queue.engine, Engine)
        with queue.session() as session:
            assert session.scalar(select(func.count()).select_from(Job)) == 0
        queue.upgrade()
        queue.engine.dispose()


def test_a_task_can_be_bare_or_have_every_option(queue: PgQueue) -> None:
    @queue.task
    def bare(user_id: int) -> None: ...

    @queue.task(
        name="mail.welcome",
        queue="mail",
        priority=5,
        max_attempts=10,
        timeout=timedelta(seconds=30),
        transactional=False,
        retry=Retry.exponential(
            base=timedelta(seconds=1), factor=2, cap=timedelta(hours=1), jitter=True
        ),
        unique_key=lambda user_id: f"welcome:{user_id}",
    )
    def send_welcome(user_id: int) -> None: ...

    with queue.session() as session:
        first = send_welcome.enqueue(session, 7)
        again = send_welcome.enqueue(session, user_id=7)

        assert again is first
        assert (first.queue, first.task, first.unique_key) == ("mail", "mail.welcome", "welcome:7")
        session.add(send_welcome.job(7))
        with pytest.raises(DuplicateJob, match="welcome:7"):
            session.flush()
    assert bare.name.endswith("bare")


def test_retry_policies_are_made_and_narrowed() -> None:
    second = timedelta(seconds=1)

    policies = [
        Retry.constant(second),
        Retry.linear(second, cap=second),
        Retry.exponential(),
        Retry.never(),
        Retry(lambda attempt, error: second),
        Retry.exponential().only(OSError),
        Retry.exponential().never_on(ValueError, KeyError),
    ]

    assert all(isinstance(policy, Retry) for policy in policies)


def test_every_way_to_enqueue_gives_a_job_that_runs(queue: PgQueue) -> None:
    ran: list[int] = []

    @queue.task
    def note(user_id: int) -> None:
        ran.append(user_id)

    note(0)
    with queue.session() as session, session.begin():
        job = note.enqueue(session, 1)
        assert job.id > 0
        session.add(note.job(2))
        ids = note.enqueue_many(session, [(3,), (4,), {"user_id": 5}])
        soon = datetime.now(UTC) + timedelta(milliseconds=1)
        note.options(run_at=soon, priority=0, unique_key="k", max_attempts=2).enqueue(session, 6)
        hour = note.options(delay=timedelta(hours=1), queue="slow").enqueue(session, 9)
        assert hour.run_at > datetime.now(UTC) + timedelta(minutes=59)
    assert note.delay(7).id > max(ids)

    counts = Worker(queue, queues=["default"], concurrency=2).run_until_empty(timeout=60)

    assert sorted(ran) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert counts == {"succeeded": 7}


async def _enqueue_async(url: str, queue: PgQueue) -> None:
    @queue.task(name="welcome")
    async def send_welcome(user_id: int) -> None: ...

    engine = create_async_engine(url)
    async with async_sessionmaker(engine)() as session, session.begin():
        job = await send_welcome.enqueue_async(session, 7)
        session.add(send_welcome.job(8))
        await session.flush()
        ids = await send_welcome.enqueue_many_async(session, [(9,), {"user_id": 10}])
        assert await session.run_sync(queue.cancel, job.id)
        assert await session.run_sync(queue.requeue, job.id)
        assert await session.run_sync(queue.cancel_by_key, "seven") == {}
        assert len(ids) == 2
    await engine.dispose()


def test_the_same_on_an_async_session(queue: PgQueue, database_url: str) -> None:
    import asyncio

    asyncio.run(_enqueue_async(database_url, queue))

    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 4}


def test_injected_parameters_come_first_and_make_the_task_transactional(queue: PgQueue) -> None:
    seen: list[JobContext] = []

    @queue.task(retry=Retry.never())
    def pay(session: Session, ctx: JobContext, order_id: int) -> None:
        seen.append(ctx)
        session.execute(text("INSERT INTO sent VALUES (:who)"), {"who": order_id})
        if order_id == 13:
            raise ValueError("unlucky")

    @queue.task
    async def pay_later(session: AsyncSession, order_id: int) -> None:
        await session.execute(text("INSERT INTO sent VALUES (:who)"), {"who": order_id})

    with queue.session() as session, session.begin():
        job = pay.enqueue(session, 12)
        pay.enqueue(session, 13)
        pay_later.enqueue(session, 14)
        job_id = job.id

    counts = Worker(queue).run_until_empty(timeout=60)

    assert counts == {"succeeded": 2, "failed": 1}
    ctx = next(ctx for ctx in seen if ctx.job_id == job_id)
    assert (ctx.attempt, ctx.max_attempts, ctx.queue) == (1, 10, "default")
    assert ctx.task == pay.name
    assert isinstance(ctx.session, Session)
    assert not ctx.is_cancelled()
    with queue.session() as session:
        assert set(session.scalars(text("SELECT who FROM sent"))) == {12, 14}
        attempt = session.scalars(select(JobAttempt)).one()
        assert (attempt.outcome, attempt.error_type, attempt.error) == (
            "failed",
            "ValueError",
            "unlucky",
        )
        assert session.scalars(select(DeadLetter)).one().outcome == "failed"


def test_a_plain_call_with_a_session_commits_it(queue: PgQueue) -> None:
    @queue.task
    def pay(session: Session, order_id: int) -> int:
        session.execute(text("INSERT INTO sent VALUES (:who)"), {"who": order_id})
        return order_id

    assert pay(5) == 5

    with queue.session() as session:
        assert session.scalar(text("SELECT who FROM sent")) == 5


def test_outcomes_returned_keep_the_writes_and_raised_undo_them(queue: PgQueue) -> None:
    @queue.task
    def say(session: Session, ctx: JobContext, word: str, how: str) -> object:
        session.execute(text("INSERT INTO sent VALUES (:who)"), {"who": ctx.job_id})
        wish = {"cancel": Cancel("no"), "discard": Discard("no"), "snooze": Snooze(HOUR)}[word]
        if how == "raise":
            raise wish
        return wish

    with queue.session() as session, session.begin():
        kept = [say.enqueue(session, w, "return").id for w in ("cancel", "discard", "snooze")]
        undone = [say.enqueue(session, w, "raise").id for w in ("cancel", "discard", "snooze")]

    Worker(queue).run_until_empty(timeout=60)

    with queue.session() as session:
        statuses = [session.get_one(Job, id).status for id in kept]
        assert statuses == [session.get_one(Job, id).status for id in undone]
        assert statuses == [JobStatus.CANCELLED, JobStatus.FAILED, JobStatus.PENDING]
        assert set(session.scalars(text("SELECT who FROM sent"))) == set(kept)


HOUR = timedelta(hours=1)


def test_a_worker_runs_until_it_is_stopped(queue: PgQueue) -> None:
    started = threading.Event()

    @queue.task
    def start() -> None:
        started.set()

    worker = Worker(queue, queues=["mail", "default"], concurrency=10)
    thread = threading.Thread(target=worker.run)
    thread.start()
    start.delay()

    assert started.wait(60)
    worker.stop()
    thread.join(60)
    assert not thread.is_alive()
    with queue.session() as session:
        assert session.scalar(select(func.count()).select_from(Lease)) == 0
        assert session.scalar(select(func.count()).select_from(MessageQueue)) == 0
        assert queue.check(session) == []


def test_a_claim_runs_a_job_in_the_transaction_of_the_caller(queue: PgQueue) -> None:
    @queue.task
    def add(a: int, b: int) -> int:
        return a + b

    job_id = add.delay(1, b=2).id
    with queue.session() as session:
        with queue.claim(session, queues=["default"]) as claimed:
            assert isinstance(claimed, ClaimedJob)
            assert (claimed.job_id, claimed.task, claimed.args) == (job_id, add, {"a": 1, "b": 2})
            assert (claimed.attempt, claimed.max_attempts, claimed.meta) == (1, 10, {})
            assert (claimed.run(), claimed.result, claimed.outcome) == (3, 3, None)
        session.commit()

    assert claimed is not None
    assert claimed.outcome == "succeeded"
    with queue.session() as session, queue.claim(session) as claimed:
        assert claimed is None


def test_run_until_empty_ends_at_its_timeout(queue: PgQueue) -> None:
    @queue.task(retry=Retry.constant(timedelta(0)), max_attempts=30_000)
    def again() -> None:
        raise OSError

    again.delay()
    began = time.monotonic()

    counts = Worker(queue).run_until_empty(timeout=1)

    assert time.monotonic() - began < 60
    assert counts["retried"] >= 1


def test_cancel_and_requeue_say_what_they_did(queue: PgQueue) -> None:
    @queue.task
    def note(n: int) -> None: ...

    with queue.session() as session:
        job = note.enqueue(session, 1)

        assert queue.cancel(session, job.id)
        assert not queue.cancel(session, job.id)
        assert queue.requeue(session, job.id)
        assert not queue.requeue(session, job.id)
        with pytest.raises(PgQueueError, match="job 999999 does not exist"):
            queue.cancel(session, 999999)


def test_a_scoped_session_serves_too(queue: PgQueue) -> None:
    @queue.task
    def note(n: int) -> None: ...

    scoped = scoped_session(queue.sessions)

    job = note.enqueue(scoped, 1)

    assert queue.cancel(scoped, job.id)
    scoped.commit()
    scoped.remove()


def test_bad_arguments_are_type_or_value_errors_and_write_nothing(queue: PgQueue) -> None:
    @queue.task
    def note(n: int) -> None: ...

    with queue.session() as session:
        for wrong in ("x", None, 1.5):
            with pytest.raises(TypeError, match=r"note.*n"):
                note.enqueue(session, wrong)  # type: ignore[arg-type]  # refused at run time too
        with pytest.raises(TypeError, match="note"):
            note.enqueue(session)  # type: ignore[call-arg]  # refused at run time too
        with pytest.raises(ValueError, match="priority"):
            note.options(priority=10)

        assert session.scalar(select(func.count()).select_from(Job)) == 0


def test_another_kind_of_database_is_refused() -> None:
    with pytest.raises(PgQueueError, match="needs a PostgreSQL database, not sqlite"):
        PgQueue("sqlite://")


def test_an_operator_gives_an_id_and_not_a_job(queue: PgQueue) -> None:
    @queue.task
    def note(n: int) -> None: ...

    with queue.session() as session:
        job = note.enqueue(session, 1)

        with pytest.raises(TypeError, match=r"give job\.id"):
            queue.cancel(session, job)  # type: ignore[arg-type]  # refused at run time too


@pytest.mark.parametrize("words", ["bad \x00", "lone \ud800", ValueError("no text")])
def test_whatever_words_a_handler_ends_with_its_neighbours_end_too(
    queue: PgQueue, words: str
) -> None:
    @queue.task
    def cancel() -> None:
        raise Cancel(words)

    @queue.task
    def discard() -> None:
        raise Discard(words)

    @queue.task
    def note(n: int) -> None: ...

    with queue.session() as session, session.begin():
        cancel.enqueue(session)
        discard.enqueue(session)
        note.enqueue_many(session, [(n,) for n in range(5)])

    counts = Worker(queue).run_until_empty(timeout=60)

    assert counts == {"cancelled": 1, "failed": 1, "succeeded": 5}
