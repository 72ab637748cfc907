"""``queue.wait``: a caller waits for the end of a job."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from worker_rig import PATIENCE, endings, running, wait_until

from pgqueue import (
    ArgumentsError,
    Job,
    JobNotFound,
    JobState,
    JobStatus,
    OptionError,
    PgQueue,
    PgQueueError,
    Retry,
    WaitTimeout,
    Worker,
    waiting,
)
from pgqueue.database.notifications import Listener
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import CLAIMING
from pgqueue.repository.tables import SLEEPERS
from pgqueue.repository.watches import ENDS, WATCHES

LONG = timedelta(seconds=PATIENCE)
NEVER = 3600.0


class Waiter:
    """A wait in a thread."""

    def __init__(self, queue: PgQueue, job_id: int) -> None:
        self.result: JobState | Exception | None = None
        self._queue, self._job_id = queue, job_id
        self._thread = Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self.result = self._queue.wait(self._job_id, timeout=10 * LONG)
        except Exception as error:
            self.result = error

    def ended(self) -> Any:
        self._thread.join(PATIENCE)
        return self.result


@contextmanager
def hearing(engine: Engine, channel: str) -> Iterator[Callable[[], set[str]]]:
    """Wait for what is told on a channel."""
    with (
        own_connection(engine, CLAIMING) as connection,
        closing(Listener(enabled=True, channel=channel)) as listener,
    ):
        listener.share(connection)
        listener.wait(0)
        yield lambda: listener.wait(PATIENCE)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


@pytest.fixture
def polls_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_READ", NEVER)


def connections_of_waits(queue: PgQueue) -> list[int]:
    statement = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE '%waits'"
    with queue.session() as session:
        return list(session.scalars(text(statement)))


def test_a_wait_returns_the_state_of_the_ended_job(queue: PgQueue) -> None:
    @queue.task(name="add")
    def add(numbers: list[int]) -> int:
        return sum(numbers)

    with running(Worker(queue)):
        state = queue.wait(add.delay([1, 2]), timeout=LONG)
        later = asyncio.run(queue.wait_async(state.id, timeout=LONG))

    assert (state.status, state.result) == (JobStatus.SUCCEEDED, 3)
    assert later == state


def test_a_failed_job_ends_the_wait_too(queue: PgQueue) -> None:
    @queue.task(name="fail", retry=Retry.never())
    def fail() -> None:
        raise ValueError("no")

    with running(Worker(queue)):
        state = queue.wait(fail.delay(), timeout=LONG)

    assert (state.status, state.error) == (JobStatus.FAILED, "no")


@pytest.mark.usefixtures("polls_never")
def test_the_worker_that_ends_the_job_ends_the_wait(queue: PgQueue, engine: Engine) -> None:
    """Nothing polls here."""
    may_end, marked = Event(), Event()

    @queue.task(name="long")
    def long() -> str:
        may_end.wait(PATIENCE)
        return "done"

    @queue.task(name="mark")
    def mark() -> None:
        marked.set()

    job = long.delay().id
    with running(Worker(queue, concurrency=2)), hearing(engine, WATCHES) as announced:
        until_it_listens(queue)
        waiter = Waiter(queue, job)
        assert announced() == {str(job)}
        mark.delay()  # the worker hears of the wait before it claims this job
        assert marked.wait(PATIENCE)
        may_end.set()

        state = waiter.ended()

    assert state.result == "done"


@pytest.mark.usefixtures("polls_never")
def test_nobody_is_told_of_the_end_of_a_job_for_which_nobody_waits(
    queue: PgQueue, engine: Engine
) -> None:
    may_end = Event()

    @queue.task(name="long")
    def long() -> None:
        may_end.wait(PATIENCE)

    @queue.task(name="quick")
    def quick() -> None: ...

    job = long.delay().id
    with (
        running(Worker(queue, concurrency=2)),
        hearing(engine, WATCHES) as announced,
        hearing(engine, ENDS) as told,
    ):
        until_it_listens(queue)
        waiter = Waiter(queue, job)
        announced()
        other = quick.delay().id
        wait_until(lambda: outcome(queue, other) == "succeeded")
        may_end.set()

        assert told() == {str(job)}
        waiter.ended()


def until_it_listens(queue: PgQueue) -> None:
    """Wait until the worker sleeps."""
    statement = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' "
        "AND (classid::bigint << 32) | objid::bigint = :key"
    )
    with queue.session() as session:
        wait_until(lambda: session.scalar(text(statement), {"key": SLEEPERS}))


def outcome(queue: PgQueue, job_id: int) -> str | None:
    with queue.session() as session:
        return session.get_one(Job, job_id).outcome


def test_without_notifications_a_wait_polls(engine: Engine) -> None:
    queue = PgQueue(engine, notify=False)

    @queue.task(name="add")
    def add() -> int:
        return 3

    waiter = Waiter(queue, add.delay().id)
    endings(Worker(queue))

    assert waiter.ended().result == 3


def test_a_thousand_coroutines_wait_with_one_connection(queue: PgQueue) -> None:
    may_end = Event()

    @queue.task(name="number")
    async def number(n: int) -> int:
        while not may_end.is_set():
            await asyncio.sleep(0.005)
        return n

    with queue.session() as session, session.begin():
        jobs = number.enqueue_many(session, [(n,) for n in range(1000)])

    async def main() -> list[Any]:
        waits = [asyncio.create_task(queue.wait_async(job, timeout=LONG)) for job in jobs]
        while not await asyncio.to_thread(connections_of_waits, queue):
            await asyncio.sleep(0.01)
        may_end.set()
        states = await asyncio.gather(*waits)
        assert len(await asyncio.to_thread(connections_of_waits, queue)) == 1
        return [state.result for state in states]

    with running(Worker(queue, concurrency=10)):
        assert asyncio.run(main()) == list(range(1000))


def test_a_wait_that_takes_too_long_says_what_the_job_does(queue: PgQueue) -> None:
    @queue.task(name="lonely", max_attempts=3)
    def lonely() -> None: ...

    job = lonely.delay()

    with pytest.raises(WaitTimeout, match=rf"job {job.id} .* pending, attempt 0 of 3") as raised:
        queue.wait(job, timeout=timedelta(milliseconds=10))

    assert raised.value.state.status is JobStatus.PENDING
    with pytest.raises(WaitTimeout):
        asyncio.run(queue.wait_async(job.id, timeout=timedelta(0)))


def test_an_uncommitted_job_cannot_be_waited_for(queue: PgQueue) -> None:
    @queue.task(name="new")
    def new() -> None: ...

    with queue.session() as session:
        job = new.enqueue(session).id
        with pytest.raises(JobNotFound, match=f"job {job} .* never committed"):
            queue.wait(job, timeout=LONG)
        with pytest.raises(JobNotFound):
            asyncio.run(queue.wait_async(job, timeout=LONG))


def test_a_job_that_is_deleted_at_its_end_has_no_state(queue: PgQueue, engine: Engine) -> None:
    @queue.task(name="brief", keep=timedelta(0))
    def brief() -> None: ...

    job = brief.delay().id
    with hearing(engine, WATCHES) as announced:
        waiter = Waiter(queue, job)
        announced()
        wait_until(lambda: has_read_jobs(queue))
        endings(Worker(queue))

        error = waiter.ended()

    assert isinstance(error, JobNotFound)
    assert "was deleted while somebody waited" in str(error)


def has_read_jobs(queue: PgQueue) -> bool:
    statement = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE application_name LIKE '%waits' AND state = 'idle' AND query LIKE '%NOT (EXISTS%'"
    )
    with queue.session() as session:
        return bool(session.scalar(text(statement)) == 1)


def test_a_handler_is_pointed_to_gather(queue: PgQueue) -> None:
    refusals: list[str] = []

    @queue.task(name="other")
    def other() -> None: ...

    @queue.task(name="impatient")
    def impatient(job_id: int) -> None:
        try:
            queue.wait(job_id, timeout=LONG)
        except PgQueueError as error:
            refusals.append(str(error))

    @queue.task(name="impatient_async")
    async def impatient_async(job_id: int) -> None:
        try:
            await queue.wait_async(job_id, timeout=LONG)
        except PgQueueError as error:
            refusals.append(str(error))

    job = other.options(delay=timedelta(hours=1)).delay()
    impatient.delay(job.id)
    impatient_async.delay(job.id)
    endings(Worker(queue, concurrency=1))

    assert ["ctx.gather" in refusal for refusal in refusals] == [True, True]


def test_in_the_transaction_of_a_test_the_job_must_have_run(connection: Connection) -> None:
    queue = PgQueue(connection)

    @queue.task(name="add")
    def add() -> int:
        return 3

    job = add.delay()
    with pytest.raises(PgQueueError, match="run_until_empty"):
        queue.wait(job, timeout=LONG)

    Worker(queue).run_until_empty()

    assert queue.wait(job.id, timeout=LONG).result == 3
    assert asyncio.run(queue.wait_async(job.id, timeout=LONG)).result == 3


def test_a_wait_survives_the_end_of_its_connection(queue: PgQueue) -> None:
    @queue.task(name="add")
    def add() -> int:
        return 3

    waiter = Waiter(queue, add.delay().id)
    wait_until(lambda: connections_of_waits(queue))
    with queue.session() as session:
        for pid in connections_of_waits(queue):
            session.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
    endings(Worker(queue))

    assert waiter.ended().result == 3


def test_waits_that_have_ended_leave_no_connection(
    queue: PgQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "KEEP_FOR", 0.05)

    @queue.task(name="add")
    def add() -> None: ...

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "pgqueue-waits"}

    of_other_tests = threads()
    with running(Worker(queue)):
        queue.wait(add.delay(), timeout=LONG)
        wait_until(lambda: not threads() - of_other_tests)
        wait_until(lambda: not connections_of_waits(queue))

        assert queue.wait(add.delay(), timeout=LONG).has_ended


@pytest.mark.parametrize("timeout", [5, None, timedelta(seconds=-1)])
def test_a_wrong_timeout_is_refused(queue: PgQueue, timeout: Any) -> None:
    with pytest.raises(OptionError, match="wait: timeout"):
        queue.wait(1, timeout=timeout)


def test_a_batch_is_no_job_and_its_id_is_not_asked_for(queue: PgQueue) -> None:
    with queue.session() as session, queue.workflow(session) as flow:
        pass
    wrong: Any = flow

    with pytest.raises(ArgumentsError, match="wait: a workflow is no job; wait for each of its"):
        queue.wait(wrong, timeout=LONG)


def test_a_wrong_id_is_refused(queue: PgQueue) -> None:
    wrong: Any = "7"
    with pytest.raises(ArgumentsError, match="id"):
        queue.wait(wrong, timeout=LONG)
