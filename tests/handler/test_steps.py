"""The steps of a handler, which later attempts do not run again."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session
from worker_rig import endings, wait_until

from pgqueue import JobContext, PgQueue, Retry, Worker
from pgqueue.tables import Job, JobStep
from pgqueue.testing import run_jobs

AT_ONCE = Retry.constant(timedelta(0))


class Rig:
    """A queue with a handler that is given its steps, and what these have done."""

    def __init__(self, engine: Engine) -> None:
        self.queue = PgQueue(engine)
        self.calls: list[str] = []
        self.failures = 0

    def handles(self, handler: Callable[[JobContext], Any], **options: Any) -> int:
        task = self.queue.task(name="order", retry=AT_ONCE, max_attempts=5, **options)(handler)
        return task.delay().id

    def charge(self, amount: int) -> tuple[int, str]:
        self.calls.append("charge")
        return amount, "paid"

    def fail_once(self) -> None:
        self.failures += 1
        if self.failures == 1:
            raise ValueError("planned")

    def work(self) -> dict[str, int]:
        return endings(Worker(self.queue, concurrency=1))

    def steps(self) -> dict[str, Any]:
        with self.queue.session() as session:
            return {step.name: step.result for step in session.scalars(select(JobStep))}


@pytest.fixture
def rig(engine: Engine) -> Rig:
    return Rig(engine)


def test_a_recorded_step_is_not_run_again(rig: Rig) -> None:
    seen: list[Any] = []

    def order(ctx: JobContext) -> None:
        seen.append(ctx.step("charge", rig.charge, 5))
        rig.fail_once()

    rig.handles(order)

    assert rig.work() == {"retried": 1, "succeeded": 1}
    assert rig.calls == ["charge"]
    assert seen == [[5, "paid"]] * 2  # as JSON gives it back, also the first time
    assert rig.steps() == {"charge": [5, "paid"]}


def test_no_step_begins_after_a_cancel_and_a_worker_that_stops_hands_on(rig: Rig) -> None:
    workers: list[Worker] = []

    def order(ctx: JobContext, is_cancelled: bool) -> None:
        ctx.step("charge", rig.charge, 5)
        if is_cancelled:
            with rig.queue.session() as session, session.begin():
                rig.queue.cancel(session, ctx.job_id)
            wait_until(ctx.is_cancelled)
        elif not ctx.is_stopping() and len(workers) == 1:
            workers[0].stop()
            wait_until(ctx.is_stopping)
        rig.calls.append("before")
        ctx.step("ship", rig.calls.append, "ship")

    task = rig.queue.task(name="order")(order)
    cancelled = task.delay(True).id
    assert rig.work() == {"cancelled": 1}
    assert rig.calls == ["charge", "before"]

    rig.calls.clear()
    stopped = task.delay(False).id
    for _ in range(2):
        workers.append(Worker(rig.queue, concurrency=1))
        workers[-1].run_until_empty(timeout=60)
    assert rig.calls == ["charge", "before", "before", "ship"]
    with rig.queue.session() as session:
        jobs = [session.get_one(Job, job_id) for job_id in (cancelled, stopped)]
        assert [(job.status.value, job.attempts) for job in jobs] == [
            ("cancelled", 1),
            ("succeeded", 1),
        ]


def test_a_step_with_a_session_commits_its_writes_with_its_record(rig: Rig) -> None:
    follow = rig.queue.task(name="follow")(lambda: None)

    def book(session: Session, fails: bool) -> None:
        follow.enqueue(session)
        if fails:
            raise ValueError("planned")

    def order(ctx: JobContext) -> None:
        ctx.step("book", book, ctx.attempt == 1)
        rig.fail_once()

    rig.handles(order)

    assert rig.work() == {"retried": 2, "succeeded": 2}
    with rig.queue.session() as session:
        assert session.query(Job).where(Job.task == "follow").count() == 1


def test_the_steps_of_an_async_handler(rig: Rig) -> None:
    async def fetch(n: int) -> int:
        rig.calls.append("fetch")
        await asyncio.sleep(0)
        return n

    async def order(ctx: JobContext) -> int:
        fetched = await ctx.step_async("fetch", fetch, 3)
        charged = await ctx.step_async("charge", rig.charge, 5)
        rig.fail_once()
        return int(fetched + charged[0])

    job = rig.handles(order)

    assert rig.work() == {"retried": 1, "succeeded": 1}
    assert rig.calls == ["fetch", "charge"]
    with rig.queue.session() as session:
        assert session.get_one(Job, job).result == 8


def test_a_requeue_goes_on_from_what_is_recorded(rig: Rig) -> None:
    def order(ctx: JobContext) -> None:
        ctx.step("charge", rig.charge, 5)
        rig.fail_once()

    job = rig.queue.task(name="order", max_attempts=1)(order).delay().id
    rig.work()
    with rig.queue.session() as session, session.begin():
        rig.queue.requeue(session, job)

    assert rig.work() == {"succeeded": 1}
    assert rig.calls == ["charge"]


def test_a_late_step_of_a_lost_attempt_is_refused(rig: Rig, engine: Engine) -> None:
    lost: list[str] = []

    def order(ctx: JobContext) -> None:
        if not lost:
            with engine.begin() as connection:
                connection.execute(text("DELETE FROM pgqueue.leases"))
            try:
                ctx.step("charge", rig.charge, 5)
            except RuntimeError as error:
                lost.append(str(error))

    rig.handles(order)
    worker = Worker(rig.queue, concurrency=1)

    worker.run_until_empty(timeout=60)

    assert "has lost its job" in lost[0]
    assert rig.steps() == {}


def test_a_sleep_frees_the_slot_and_is_not_caught(rig: Rig, engine: Engine) -> None:
    ended: list[str] = []

    def order(ctx: JobContext) -> None:
        try:
            ctx.step("charge", rig.charge, 5)
            ctx.sleep("cool down", timedelta(hours=1))
        except Exception:
            ended.append("caught")
        finally:
            ended.append("finally")

    job = rig.handles(order)

    assert rig.work() == {"snoozed": 1}
    assert ended == ["finally"]
    with rig.queue.session() as session, session.begin():
        left: timedelta = session.execute(
            text("SELECT run_at - clock_timestamp() FROM pgqueue.jobs")
        ).scalar_one()
        assert timedelta(minutes=59) < left <= timedelta(hours=1)
        rig.queue.run_now(session, job)  # the hour is not over
    assert rig.work() == {"snoozed": 1}
    with engine.begin() as connection:
        past = "UPDATE pgqueue.job_steps SET finished_at = now() WHERE name = 'cool down'"
        connection.execute(text(past))
    with rig.queue.session() as session, session.begin():
        rig.queue.run_now(session, job)
    assert rig.work() == {"succeeded": 1}
    assert rig.calls == ["charge"]


def test_a_test_runs_steps_and_passes_over_sleeps(rig: Rig) -> None:
    def order(ctx: JobContext) -> str:
        charged = ctx.step("charge", rig.charge, 5)
        ctx.sleep("cool down", timedelta(days=1))
        return str(charged[1])

    task = rig.queue.task(name="order")(order)
    with rig.queue.session() as session:
        job = task.enqueue(session)
        run_jobs(session, queue=rig.queue, until=timedelta(days=2))
        assert (job.outcome, job.result) == ("succeeded", "paid")
        session.rollback()
    assert rig.calls == ["charge"]
    assert rig.steps() == {}


def test_a_worker_of_a_test_passes_over_sleeps(rig: Rig) -> None:
    def order(ctx: JobContext) -> None:
        ctx.sleep("a week", timedelta(weeks=1))
        ctx.sleep("another", timedelta(weeks=1))

    rig.handles(order)

    ends = Worker(rig.queue).run_until_empty(timeout=60, ahead=timedelta(days=15))

    assert ends == {"snoozed": 2, "succeeded": 1}


def test_a_name_stays_of_one_kind(rig: Rig) -> None:
    def order(ctx: JobContext) -> None:
        if ctx.attempt == 1:
            ctx.step("wait", rig.charge, 5)
            rig.fail_once()
        ctx.sleep("wait", timedelta(0))

    job = rig.queue.task(name="order", retry=AT_ONCE, max_attempts=2)(order).delay().id

    assert rig.work() == {"retried": 1, "failed": 1}
    with rig.queue.session() as session:
        error = str(session.get_one(Job, job).last_error)
        assert "'wait' is on record as a step, and this is a sleep" in error


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda ctx: [ctx.step("a", str) for _ in range(2)], "'a' comes twice in one attempt"),
        (lambda ctx: ctx.step("", str), "the name of a step is ''"),
        (lambda ctx: ctx.step("a", object), "step 'a': object"),
        (lambda ctx: ctx.sleep("a", 5), "takes a timedelta from zero to 36525 days, not 5"),
    ],
)
def test_wrong_steps_are_refused(
    rig: Rig, wrong: Callable[[JobContext], Any], message: str
) -> None:
    def order(ctx: JobContext) -> None:
        wrong(ctx)

    job = rig.queue.task(name="order", max_attempts=1)(order).delay().id

    assert rig.work() == {"failed": 1}
    with rig.queue.session() as session:
        assert message in str(session.get_one(Job, job).last_error)


def test_a_handler_with_a_session_has_no_steps(rig: Rig) -> None:
    def order(session: Session, ctx: JobContext) -> None:
        ctx.step("charge", rig.charge, 5)

    job = rig.queue.task(name="order", max_attempts=1)(order).delay().id

    rig.work()
    with rig.queue.session() as session:
        assert "is for handlers without a session" in str(session.get_one(Job, job).last_error)


def test_an_async_handler_gives_a_plain_function_a_plain_session(rig: Rig) -> None:
    follow = rig.queue.task(name="follow")(lambda: None)

    def book(session: Session) -> str:
        follow.enqueue(session)
        return type(session).__name__

    async def order(ctx: JobContext) -> str:
        return str(await ctx.step_async("book", book))

    job = rig.handles(order)

    assert rig.work() == {"succeeded": 2}
    with rig.queue.session() as session:
        assert "Async" not in str(session.get_one(Job, job).result)


def test_a_step_takes_arguments_of_any_name_and_functions_of_any_kind(rig: Rig) -> None:
    def greet(name: str, function: str) -> str:
        return f"{function} {name}"

    def order(ctx: JobContext) -> list[Any]:
        return [
            ctx.step("greet", greet, name="Ann", function="Dear"),
            ctx.step("partial", partial(greet, "Bob"), function="Dear"),
            ctx.step("built in", len, "abc"),
        ]

    job = rig.handles(order)

    rig.work()
    with rig.queue.session() as session:
        assert session.get_one(Job, job).result == ["Dear Ann", "Dear Bob", 3]


def test_one_step_at_a_time(rig: Rig) -> None:
    async def order(ctx: JobContext) -> None:
        await asyncio.gather(*(ctx.step_async(name, asyncio.sleep, 0) for name in ("a", "b")))

    job = rig.queue.task(name="order", max_attempts=1)(order).delay().id

    assert rig.work() == {"failed": 1}
    with rig.queue.session() as session:
        error = str(session.get_one(Job, job).last_error)
        assert "step 'b' begins inside of step 'a', or beside it" in error


def test_a_step_that_has_failed_can_be_tried_again(rig: Rig) -> None:
    def order(ctx: JobContext) -> None:
        for _ in range(2):
            with suppress(ValueError):
                ctx.step("try", rig.fail_once)

    rig.handles(order)

    assert rig.work() == {"succeeded": 1}
    assert rig.steps() == {"try": None}
