"""Handlers that enqueue jobs and wait for their results."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select
from sqlalchemy.orm import Session
from worker_rig import running

from chaos.interleavings.logical_workers import execute
from chaos.workers import wait_until
from pgqueue import (
    ArgumentsError,
    Cancel,
    JobContext,
    JobsFailed,
    PgQueue,
    PgQueueError,
    Retry,
    Selection,
    Worker,
)
from pgqueue.tables import Batch, Job
from pgqueue.testing import run_jobs


class Rig:
    """A queue whose task ``gather`` gathers jobs of ``square``, and what it has gathered."""

    def __init__(self, engine: Engine) -> None:
        self.queue = PgQueue(engine, application="shop")
        self.gathered: list[Any] = []
        self.refused: set[int] = set()
        self.square = self.queue.task(name="square", retry=Retry.never())(self._square)
        retry = Retry.constant(timedelta(0))
        self.gather = self.queue.task(name="gather", retry=retry, max_attempts=2)(self._gather)

    def _square(self, number: int) -> int:
        if number in self.refused:
            raise ValueError(f"{number} is refused")
        return number**2

    def _gather(self, ctx: JobContext, numbers: list[int]) -> None:
        self.gathered.append(ctx.gather("squares", map(self.square.job, numbers)))

    def work(self, **options: Any) -> dict[str, int]:
        return Worker(self.queue, concurrency=1).run_until_empty(timeout=60, **options)

    def rows(self, *conditions: Any, of: type = Job) -> int:
        with self.queue.session() as session:
            return session.scalar(select(func.count()).select_from(of).where(*conditions)) or 0

    def requeue(self, job_id: int) -> None:
        with self.queue.session() as session, session.begin():
            self.queue.requeue(session, job_id)


@pytest.fixture
def rig(engine: Engine) -> Rig:
    return Rig(engine)


def test_the_results_come_in_the_order_of_the_jobs(rig: Rig) -> None:
    numbers = [7, 3, 300, 5, *range(50)]
    rig.gather.delay(numbers)

    assert rig.work() == {"snoozed": 1, "succeeded": 55}

    assert rig.gathered == [[number**2 for number in numbers]]
    assert rig.rows(Job.task == "gather", Job.attempts == 1) == 1
    assert rig.rows(Batch.application == "shop", of=Batch) == 1


def test_jobs_that_end_before_the_handler_sleeps_wake_it(rig: Rig) -> None:
    @rig.queue.middleware
    @contextmanager
    def sleep_late(ctx: JobContext) -> Iterator[None]:
        try:
            yield
        finally:
            if ctx.task == "gather":
                wait_until(lambda: rig.rows(Batch.ended_at.is_not(None), of=Batch) == 1)

    rig.gather.delay([1, 2])

    with running(Worker(rig.queue, concurrency=2)):
        wait_until(lambda: rig.gathered == [[1, 4]])


def test_a_failed_job_is_named_and_waited_for_when_it_is_requeued(rig: Rig) -> None:
    rig.refused = {2}
    parent = rig.gather.delay([1, 2])

    assert rig.work() == {"snoozed": 1, "succeeded": 1, "failed": 2, "retried": 1}

    with rig.queue.session() as session:
        error = session.get_one(Job, parent.id).last_error or ""
        failed = session.scalars(select(Job.id).where(Job.args["number"].as_integer() == 2)).one()
    assert f"1 of 2 jobs of 'squares' have not succeeded; first job {failed} square failed" in error
    assert "2 is refused" in error

    rig.refused.clear()
    rig.requeue(parent.id)
    rig.requeue(failed)
    # The parent is first, finds the job unfinished, and looks again.
    assert rig.work(ahead=timedelta(seconds=10)) == {"snoozed": 1, "succeeded": 2}
    assert rig.gathered == [[1, 4]]
    assert rig.rows(Job.task == "square") == 2


def test_a_handler_may_go_on_without_those_that_failed(rig: Rig) -> None:
    @rig.queue.task(name="leave")
    def leave() -> None:
        raise Cancel("not wanted")

    @rig.queue.task(name="most")
    def most(ctx: JobContext) -> None:
        try:
            ctx.gather("parts", [rig.square.job(2), leave.job(), rig.square.job(3)])
        except JobsFailed as error:
            rig.gathered += [(job.task, job.status, job.result) for job in error.jobs]

    most.delay()

    assert rig.work() == {"snoozed": 1, "succeeded": 3, "cancelled": 1}
    assert rig.gathered == [
        ("square", "succeeded", 4),
        ("leave", "cancelled", None),
        ("square", "succeeded", 9),
    ]


@pytest.mark.parametrize(
    ("deletion", "words"),
    [
        (
            "DELETE FROM pgqueue.jobs WHERE id = 2",
            "job 2 of batch 1 has been deleted, and its result with it",
        ),
        (
            # As in the pruning of a large batch, which is deleted in portions.
            "DELETE FROM pgqueue.batch_jobs WHERE job_id = 2",
            "the jobs of batch 1 have been deleted",
        ),
    ],
)
def test_results_that_are_deleted_are_not_left_out(
    rig: Rig, engine: Engine, deletion: str, words: str
) -> None:
    @rig.queue.task(name="late", retry=Retry.constant(timedelta(0)), max_attempts=2)
    def late(ctx: JobContext) -> None:
        ctx.gather("squares", [rig.square.job(4), rig.square.job(5)])
        execute(engine, deletion)
        raise ValueError("once more")

    job = late.delay()

    assert rig.work() == {"snoozed": 1, "succeeded": 2, "retried": 1, "failed": 1}
    with rig.queue.session() as session:
        assert words in (session.get_one(Job, job.id).last_error or "")


def test_no_jobs_have_no_results_in_each_later_attempt_too(rig: Rig) -> None:
    @rig.queue.task(name="found", retry=Retry.constant(timedelta(0)), max_attempts=2)
    def found(ctx: JobContext) -> None:
        numbers = range(ctx.attempt - 1)  # what is found meanwhile
        rig.gathered.append(ctx.gather("squares", map(rig.square.job, numbers)))
        if ctx.attempt == 1:
            raise ValueError("once more")

    found.delay()

    assert rig.work() == {"retried": 1, "succeeded": 1}
    assert rig.gathered == [[], []]


def test_a_batch_that_was_cancelled_comes_back_with_its_handler(rig: Rig) -> None:
    parent = rig.gather.delay([1, 2])
    with rig.queue.session() as session, session.begin():
        rig.queue.pause_task(session, "square")
    assert rig.work() == {"snoozed": 1}

    with rig.queue.session() as session, session.begin():
        rig.queue.cancel_batch(session, 1)
        rig.queue.resume_task(session, "square")
    assert rig.work() == {"retried": 1, "failed": 1}
    with rig.queue.session() as session:
        error = session.get_one(Job, parent.id).last_error or ""
    assert error.endswith(
        "2 of 2 jobs of 'squares' have not succeeded; first job 2 square cancelled"
    )

    rig.queue.operate("ann").requeue(Selection(status=["failed", "cancelled"]))
    ends = rig.work(ahead=timedelta(seconds=10))  # the handler may be the first to start
    assert (ends.pop("snoozed", 0) < 2, ends) == (True, {"succeeded": 3})
    assert rig.gathered == [[1, 4]]


def test_to_cancel_the_handler_leaves_the_jobs_to_which_it_can_come_back(rig: Rig) -> None:
    parent = rig.gather.delay([1, 2])
    with rig.queue.session() as session, session.begin():
        rig.queue.pause_task(session, "square")
    assert rig.work() == {"snoozed": 1}

    with rig.queue.session() as session, session.begin():
        rig.queue.cancel(session, parent.id)
        rig.queue.resume_task(session, "square")
    assert rig.work() == {"succeeded": 2}

    rig.requeue(parent.id)
    assert rig.work() == {"succeeded": 1}
    assert (rig.gathered, rig.rows(Job.task == "square")) == ([[1, 4]], 2)


def test_gathered_jobs_belong_to_no_batch_of_the_handler(rig: Rig) -> None:
    """Nor to its workflow; and they may gather others."""

    @rig.queue.task(name="whole")
    def whole(ctx: JobContext) -> None:
        ctx.gather("parts", [rig.gather.job([1, 2]), rig.gather.job([3])])

    with rig.queue.session() as session, session.begin():
        with rig.queue.batch(session) as batch:
            whole.enqueue(session)
        with rig.queue.workflow(session) as flow:
            flow.add(whole.job())

    assert rig.work() == {"snoozed": 6, "succeeded": 12}

    with rig.queue.session() as session:
        for batch_id in (batch.id, flow.id):
            state = rig.queue.get_batch(session, batch_id)
            assert (state.outcome, state.total) == ("succeeded", 1)
    assert sorted(rig.gathered) == [[1, 4], [1, 4], [9], [9]]


def test_an_attempt_that_has_lost_its_job_enqueues_nothing(rig: Rig, engine: Engine) -> None:
    lost: list[int] = []

    def listen(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if not lost and "INSERT INTO pgqueue.job_steps" in statement:
            lost.append(1)
            execute(engine, "DELETE FROM pgqueue.leases")

    rig.gather.delay([1, 2])
    event.listen(Engine, "before_cursor_execute", listen)
    try:
        with running(Worker(rig.queue, concurrency=1)):
            wait_until(lambda: lost)
    finally:
        event.remove(Engine, "before_cursor_execute", listen)

    assert rig.rows(Job.task == "square") == rig.rows(of=Batch) == 0


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        (lambda rig: [rig.square.delay(1)], "give new jobs, as task.job"),
        (lambda rig: [7], "is given 7; give new jobs"),
        (lambda rig: [rig.square.job(1)] * 2, "is given a job twice"),
        (
            lambda rig: [rig.square.job(1), rig.square.options(unique_key="a").job(2)],
            "DuplicateJob",
        ),
    ],
)
def test_what_cannot_be_enqueued_enqueues_nothing(
    rig: Rig, jobs: Callable[[Rig], Any], words: str
) -> None:
    rig.square.options(unique_key="a", delay=timedelta(days=1)).delay(0)

    @rig.queue.task(name="wrong", retry=Retry.never())
    def wrong(ctx: JobContext) -> None:
        try:
            ctx.gather("wrong", jobs(rig))
        except (ArgumentsError, PgQueueError) as error:
            rig.gathered.append(f"{type(error).__name__}: {error}")

    wrong.delay()
    rig.work()

    assert words in rig.gathered[0]
    assert rig.rows(of=Batch) == 0


def test_async_handlers_gather(rig: Rig) -> None:
    @rig.queue.task(name="gather_async")
    async def gather(ctx: JobContext) -> None:
        await asyncio.sleep(0)
        rig.gathered.append(await ctx.gather_async("squares", [rig.square.job(4)]))

    gather.delay()

    assert rig.work() == {"snoozed": 1, "succeeded": 2}
    assert rig.gathered == [[16]]


def test_in_the_transaction_of_a_test(rig: Rig, engine: Engine) -> None:
    with engine.connect() as connection, connection.begin() as transaction:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            rig.gather.enqueue(session, [5, 6])
            session.flush()
            report = run_jobs(session, queue=rig.queue)
        transaction.rollback()

    assert rig.gathered == [[25, 36]]
    assert len(report) == 4
