"""``queue.claim()``: a job that runs and ends in the transaction of the caller."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from pgqueue import (
    AttemptEnded,
    ClaimedJob,
    Discard,
    Job,
    JobAttempt,
    JobContext,
    Limit,
    NoTransaction,
    OptionError,
    PgQueue,
    PgQueueError,
    Retry,
    Snooze,
    Unique,
    Worker,
    claims,
)

HOUR = timedelta(hours=1)
FORKS = multiprocessing.get_context("fork")


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE notes (word text)"))
    return PgQueue(engine)


def note(session: Session, word: str) -> None:
    session.execute(text("INSERT INTO notes VALUES (:word)"), {"word": word})


def notes(queue: PgQueue) -> list[str]:
    with queue.session() as session:
        return list(session.scalars(text("SELECT word FROM notes ORDER BY word")))


def only_job(queue: PgQueue) -> Job:
    with queue.session() as session:
        return session.scalars(select(Job)).one()


def work_one(queue: PgQueue, act: Callable[[Session, ClaimedJob], object]) -> ClaimedJob:
    """Claim one job, and commit."""
    with queue.session() as session, session.begin():
        with queue.claim(session) as claimed:
            assert claimed is not None
            act(session, claimed)
        assert queue.check(session) == []
    assert claimed is not None
    return claimed


def pay(queue: PgQueue, **options: Any) -> int:
    """A job of the task ``pay``, which writes its word."""
    if "pay" not in queue.tasks:

        @queue.task(name="pay", **options)
        def pay(session: Session, word: str) -> str:
            note(session, word)
            return word.upper()

    return int(queue.tasks["pay"].delay("paid").id)


def test_work_result_and_the_end_of_the_job_are_one_commit(queue: PgQueue) -> None:
    job_id = pay(queue)
    with queue.session() as session:
        with queue.claim(session, queues=["default"]) as claimed:
            assert claimed is not None
            assert (claimed.job_id, claimed.task) == (job_id, queue.tasks["pay"])
            assert (claimed.args, claimed.attempt, claimed.outcome) == ({"word": "paid"}, 1, None)
            note(session, claimed.args["word"])
            claimed.result = {"sum": 3}
        assert (only_job(queue).outcome, notes(queue)) == (None, [])

        session.commit()

    job = only_job(queue)
    assert (job.outcome, job.result, job.attempts) == ("succeeded", {"sum": 3}, 1)
    assert claimed is not None
    assert (claimed.outcome, notes(queue)) == ("succeeded", ["paid"])


def test_without_a_commit_the_job_is_free_again_and_was_not_counted(queue: PgQueue) -> None:
    pay(queue)
    for _ in range(2):
        with queue.session() as session, queue.claim(session) as claimed:
            assert claimed is not None
            assert claimed.attempt == 1


def test_none_where_nothing_is_due_known_or_admitted(queue: PgQueue) -> None:
    limited = queue.task(name="limited", limit=Limit(1))(lambda: None)
    paused = queue.task(name="paused")(lambda: None)
    limited.delay()
    paused.delay()
    paused.options(delay=HOUR).delay()
    paused.options(queue="other").delay()
    with queue.session() as session, session.begin():
        queue.pause_task(session, "paused")

        with queue.claim(session, queues=["default"]) as claimed:
            assert claimed is None


def test_two_claimers_and_a_worker_share_a_queue(queue: PgQueue) -> None:
    first, second = pay(queue), pay(queue)
    with queue.session() as one, queue.session() as other:
        with queue.claim(one) as mine:
            assert mine is not None
            assert mine.job_id == first
            assert Worker(queue, concurrency=1).run_until_empty(timeout=60) == {"succeeded": 1}
            with queue.claim(other) as theirs:
                assert theirs is None
        one.commit()
    with queue.session() as session:
        assert session.get_one(Job, second).outcome == "succeeded"


def test_run_calls_the_handler_with_the_session_inside_of_the_middlewares(queue: PgQueue) -> None:
    seen: list[tuple[int, str]] = []

    @queue.middleware
    def around(ctx: JobContext) -> Iterator[None]:
        seen.append((ctx.attempt, ctx.task))
        yield

    pay(queue)

    claimed = work_one(queue, lambda _, claimed: claimed.run())

    assert (claimed.result, only_job(queue).result) == ("PAID", "PAID")
    assert (seen, notes(queue)) == ([(1, "pay")], ["paid"])


def test_an_exception_undoes_the_block_and_is_retried_until_the_last_attempt(
    queue: PgQueue, caplog: pytest.LogCaptureFixture
) -> None:
    pay(queue, retry=Retry.constant(timedelta(0)), max_attempts=2)

    def fail(session: Session, claimed: ClaimedJob) -> None:
        note(session, "lost")
        raise ValueError(f"in attempt {claimed.attempt}")

    with queue.session() as session, session.begin():
        note(session, "before")
        with queue.claim(session) as claimed:
            assert claimed is not None
            fail(session, claimed)
    assert claimed is not None
    assert claimed.outcome == "retried"
    assert work_one(queue, fail).outcome == "failed"

    job = only_job(queue)
    assert (job.outcome, job.attempts, job.last_error) == ("failed", 2, "in attempt 2")
    assert notes(queue) == ["before"]
    with queue.session() as session:
        errors = session.scalars(select(JobAttempt.error).order_by(JobAttempt.attempt)).all()
    assert errors == ["in attempt 1", "in attempt 2"]
    assert "attempt 1 of 2: ValueError: in attempt 1; it is retried" in caplog.text


def test_an_error_of_the_database_is_an_exception_as_any_other(queue: PgQueue) -> None:
    pay(queue, retry=Retry.never())
    with queue.engine.begin() as connection:
        connection.execute(text("CREATE UNIQUE INDEX ON notes (word)"))

    def write_twice(session: Session, _: ClaimedJob) -> None:
        note(session, "same")
        note(session, "same")

    assert work_one(queue, write_twice).outcome == "failed"
    with queue.session() as session:
        assert session.scalars(select(JobAttempt.error_type)).all() == [
            "sqlalchemy.exc.IntegrityError"
        ]
    assert notes(queue) == []


@pytest.mark.parametrize(
    ("wish", "word", "attempts"),
    [(Discard("no"), "failed", 1), (Snooze(HOUR), "snoozed", 0)],
    ids=["discard", "snooze"],
)
def test_wishes_work_as_in_a_handler(
    queue: PgQueue, wish: Exception, word: str, attempts: int
) -> None:
    pay(queue)

    def raise_it(*_: Any) -> None:
        raise wish

    assert work_one(queue, raise_it).outcome == word
    assert only_job(queue).attempts == attempts


def test_a_job_cancelled_meanwhile_ends_cancelled_and_the_block_is_undone(queue: PgQueue) -> None:
    job_id = pay(queue)

    def cancelled_by_an_operator(session: Session, _: ClaimedJob) -> None:
        note(session, "lost")
        with queue.session() as operator, operator.begin():
            queue.cancel(operator, job_id)

    assert work_one(queue, cancelled_by_an_operator).outcome == "cancelled"
    assert (only_job(queue).outcome, notes(queue)) == ("cancelled", [])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("commits", [False, True])
def test_what_ends_the_program_passes_and_undoes_all(
    queue: PgQueue, error: type[BaseException], commits: bool
) -> None:
    pay(queue)
    with queue.session() as session:
        with pytest.raises(error), queue.claim(session):
            _write_and_raise(session, error)
        (session.commit if commits else session.rollback)()

    job = only_job(queue)
    assert (job.outcome, job.attempts, notes(queue)) == (None, 0, [])
    assert work_one(queue, lambda *_: None).attempt == 1


def _write_and_raise(session: Session, error: type[BaseException]) -> None:
    note(session, "lost")
    raise error


@pytest.mark.parametrize(
    "end",
    [
        Session.commit,
        Session.rollback,
        lambda session: session.connection().commit(),
        lambda session: session.connection().rollback(),
    ],
    ids=["commit", "rollback", "commit of the connection", "rollback of the connection"],
)
def test_a_block_that_ends_the_transaction_is_told_so(
    queue: PgQueue, end: Callable[[Session], None]
) -> None:
    pay(queue)
    with (
        queue.session() as session,
        pytest.raises(PgQueueError, match="transaction has ended inside of the `with` block"),
        queue.claim(session),
    ):
        end(session)

    assert work_one(queue, lambda *_: None).attempt in (1, 2), "though no worker runs"
    assert queue.check(queue.session()) == []


def test_a_claim_inside_of_a_block_rescues_nothing_of_the_block(queue: PgQueue) -> None:
    job_id = pay(queue)
    with queue.session() as session, session.begin():
        with queue.claim(session) as outer, queue.claim(session) as inner:
            assert outer is not None
        assert inner is None
        assert outer is not None
        assert outer.outcome == "succeeded"

    with queue.session() as session:
        assert session.get_one(Job, job_id).attempts == 1


def test_a_lost_connection_leaves_the_block_as_it_is(queue: PgQueue) -> None:
    """The server has undone all, so nothing is settled, and nothing hides the error."""
    job_id = pay(queue)

    def lose(session: Session) -> None:
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        with queue.engine.connect() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid, 60000)"), {"pid": pid})
        note(session, "lost")

    with (
        queue.session() as session,
        pytest.raises(OperationalError, match="terminating connection"),
        queue.claim(session),
    ):
        lose(session)

    assert work_one(queue, lambda *_: None).job_id == job_id
    assert notes(queue) == []


def test_a_killed_process_gives_its_job_back_at_once_and_uncounted(
    queue: PgQueue, database_url: str
) -> None:
    pay(queue)
    claimed_by_child = FORKS.Event()

    def claim_and_die() -> None:
        own = PgQueue(create_engine(database_url))
        own.tasks.update(queue.tasks)
        with own.session() as session, own.claim(session):
            note(session, "lost")
            claimed_by_child.set()
            os.kill(os.getpid(), signal.SIGKILL)

    queue.engine.dispose()
    process = FORKS.Process(target=claim_and_die)
    process.start()
    assert claimed_by_child.wait(60)
    process.join(60)

    claimed = None
    while claimed is None:  # the server has to notice
        with queue.session() as session, session.begin(), queue.claim(session) as claimed:
            pass
    assert (claimed.attempt, only_job(queue).attempts, notes(queue)) == (1, 1, [])


def test_keys_and_follow_ups_are_as_in_a_worker(queue: PgQueue) -> None:
    told: list[int] = []

    @queue.task(name="tell")
    def tell(job_id: int) -> None:
        told.append(job_id)

    once = Unique(by=(), until="started")

    @queue.task(name="fail", unique=once, retry=Retry.never(), on_failed=tell)
    def fail() -> None: ...

    first = fail.delay()

    def enqueue_again(session: Session, _: ClaimedJob) -> None:
        assert fail.enqueue(session).id != first.id
        raise ValueError

    assert work_one(queue, enqueue_again).outcome == "failed"
    work_one(queue, lambda _, claimed: claimed.run())
    assert told == [first.id]


def test_jobs_that_cannot_start_are_ended_and_passed_by(queue: PgQueue) -> None:
    damaged, good = pay(queue), pay(queue)
    with queue.engine.begin() as connection:
        change = text("UPDATE pgqueue.jobs SET args = '[1]' WHERE id = :id")
        connection.execute(change, {"id": damaged})

    assert work_one(queue, lambda *_: None).job_id == good
    with queue.session() as session:
        assert session.get_one(Job, damaged).outcome == "failed"


def test_of_many_that_cannot_start_some_are_ended_at_a_time(
    queue: PgQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a caller that gives up, and rolls back, would begin with all of them again."""
    monkeypatch.setattr(claims, "MOST_ENDED", 2)
    for _ in range(5):
        pay(queue)
    with queue.engine.begin() as connection:
        connection.execute(text("UPDATE pgqueue.jobs SET args = '[1]'"))
    good = pay(queue)
    got: list[tuple[int | None, bool]] = []
    for _ in range(4):
        with queue.session() as session, session.begin():
            claim = queue.claim(session)
            with claim as claimed:
                got.append((None if claimed is None else claimed.job_id, claim.has_more))

    assert got == [(None, True), (None, True), (good, False), (None, False)]
    assert queue.check(queue.session()) == []


def test_the_callbacks_hear_of_attempts_once_they_are_committed(queue: PgQueue) -> None:
    told: list[AttemptEnded] = []
    queue.on_attempt_end(told.append)
    pay(queue)
    with queue.session() as session:
        with queue.claim(session):
            pass
        session.rollback()
        with queue.claim(session):
            pass
        session.close()
        with queue.claim(session):
            pass
        with session.begin_nested():
            pass
        assert told == []
        session.commit()
        session.execute(text("SELECT 1"))
        session.commit()

    [event] = told
    assert (event.outcome, event.is_final, event.attempt) == ("succeeded", True, 1)
    assert event.waited is not None


def test_an_async_session_claims_and_runs_handlers_of_both_kinds(queue: PgQueue) -> None:
    pay(queue)

    @queue.task(name="look")
    async def look(session: AsyncSession) -> int:
        return int((await session.scalars(text("SELECT count(*) FROM notes"))).one())

    look.delay()

    async def run_both() -> list[object]:
        engine = create_async_engine(queue.engine.url)
        found: list[object] = []
        async with AsyncSession(engine) as session, session.begin():
            for _ in range(3):
                async with queue.claim(session) as claimed:
                    found.append(claimed and await claimed.run())
        await engine.dispose()
        return found

    assert asyncio.run(run_both()) == ["PAID", 1, None]
    assert notes(queue) == ["paid"]


def test_what_cannot_be_a_claim_is_refused(queue: PgQueue) -> None:
    with queue.session() as session:
        with pytest.raises(OptionError, match="give a list of queue names"):
            queue.claim(session, queues="mail")
        with pytest.raises(OptionError, match="a queue name has 1 to 64 letters"):
            queue.claim(session, queues=["no name"])
    autocommit = queue.engine.execution_options(isolation_level="AUTOCOMMIT")
    with Session(autocommit) as session, pytest.raises(NoTransaction), queue.claim(session):
        pass
