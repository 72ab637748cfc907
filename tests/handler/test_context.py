"""What a handler reads of its job, and cannot write."""

import json
import pickle
from datetime import timedelta
from threading import Event
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine
from worker_rig import PATIENCE, running

from chaos.workers import wait_until
from pgqueue import Cancel, Job, JobAttempt, JobContext, PgQueue, PgQueueError, Suspended, Worker
from pgqueue.context import ReadOnlyMeta
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.repository.claim import Claimed

HOUR = timedelta(hours=1)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def result_of(queue: PgQueue, job_id: int) -> Any:
    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}
    with queue.session() as session:
        return session.get_one(Job, job_id).result


@pytest.mark.parametrize(
    "write",
    [
        lambda meta: meta.__setitem__("a", 2),
        lambda meta: meta.__delitem__("a"),
        lambda meta: meta.update(a=2),
        lambda meta: meta.setdefault("b", 2),
        lambda meta: meta.pop("a"),
        lambda meta: meta.popitem(),
        lambda meta: meta.clear(),
        lambda meta: meta.__ior__({"a": 2}),
    ],
)
def test_meta_refuses_every_write(write: Any) -> None:
    meta = ReadOnlyMeta(a=1)

    with pytest.raises(PgQueueError, match=r"ctx\.meta cannot be changed: .* would be lost"):
        write(meta)

    assert meta == {"a": 1}
    assert json.loads(json.dumps(meta)) == pickle.loads(pickle.dumps(meta)) == {"a": 1}


def test_a_handler_that_writes_meta_is_told(queue: PgQueue) -> None:
    @queue.task(name="t")
    def note(ctx: JobContext) -> str:
        assert ctx.meta == {"a": 1}
        with pytest.raises(PgQueueError, match="cannot be changed"):
            ctx.meta["a"] = 2  # type: ignore[index]
        return "told"

    assert result_of(queue, note.options(meta={"a": 1}).delay().id) == "told"


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_handler_knows_how_long_it_may_still_run(queue: PgQueue, executor: Any) -> None:
    @queue.task(name="t", executor=executor, timeout=HOUR)
    def note(ctx: JobContext) -> bool:
        first, second = ctx.time_left(), ctx.time_left()
        assert first is not None
        assert second is not None
        return HOUR >= first >= second > timedelta(minutes=1)

    assert result_of(queue, note.delay().id) is True


def test_without_a_timeout_no_time_is_left_to_tell(queue: PgQueue) -> None:
    @queue.task(name="t", timeout=HOUR)
    def note(ctx: JobContext) -> bool:
        return ctx.time_left() is None

    assert note() is True
    assert result_of(queue, note.options(timeout=None).delay().id) is True


class TestCheck:
    def attempt(self, **options: Any) -> RunningAttempt:
        task = PgQueue().task(name="t", **options)(lambda: None)
        claimed = Claimed(5, "2030-01-01", 1, 1, "default", "t", "{}", 1, 1, 0)
        return RunningAttempt(claimed, task, worker_id=uuid4(), stopping=Event())

    def test_it_goes_on_while_nothing_is_asked(self) -> None:
        self.attempt(timeout=HOUR).context().check()

    def test_it_raises_for_a_cancel(self) -> None:
        attempt = self.attempt()
        attempt.ask_to_stop(Cancel())

        with pytest.raises(Cancel, match="the job was cancelled while its handler ran"):
            attempt.context().check()

    def test_it_raises_when_the_attempt_has_ended(self) -> None:
        attempt = self.attempt()
        attempt.lose()

        with pytest.raises(Cancel, match="the attempt has ended"):
            attempt.context().check()

    def test_it_raises_after_the_timeout(self) -> None:
        attempt = self.attempt(timeout=HOUR)
        attempt.started_at -= 3600

        with pytest.raises(TimeoutError, match="the handler ran longer than 1:00:00"):
            attempt.context().check()

    def test_it_raises_at_a_stop(self) -> None:
        attempt = self.attempt()
        attempt.stopping.set()

        with pytest.raises(Suspended):
            attempt.context().check()

    def test_outside_of_a_worker_it_does_nothing(self, queue: PgQueue) -> None:
        @queue.task(name="t")
        def note(ctx: JobContext) -> None:
            ctx.check()

        note()


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_handler_that_checks_ends_at_a_cancel_and_at_a_stop(
    queue: PgQueue, executor: Any, how: str
) -> None:
    @queue.task(name="t", executor=executor)
    def loop(ctx: JobContext) -> None:
        ctx.progress(1)
        while True:
            ctx.check()

    job_id = loop.delay().id

    def progress() -> Any:
        with queue.session() as session:
            return session.get_one(Job, job_id).progress

    worker = Worker(queue, grace=timedelta(seconds=PATIENCE))
    with running(worker):
        wait_until(progress, what="the handler runs")
        if how == "cancel":
            with queue.session() as session, session.begin():
                queue.cancel(session, job_id)

            def has_ended() -> bool:
                with queue.session() as session:
                    return queue.job_state(session, job_id).has_ended

            wait_until(has_ended, what="the handler ends")

    with queue.session() as session:
        job = session.get_one(Job, job_id)
        expected = ("cancelled", 1) if how == "cancel" else ("pending", 0)
        assert (job.status, job.attempts) == expected


def test_a_timeout_by_a_check_is_recorded_as_one(queue: PgQueue) -> None:
    @queue.task(name="t", timeout=timedelta(microseconds=1), max_attempts=1)
    def late(ctx: JobContext) -> None:
        while True:
            ctx.check()

    late.delay()

    assert Worker(queue).run_until_empty(timeout=60) == {"failed": 1}
    with queue.session() as session:
        attempt = session.query(JobAttempt).one()
        assert (attempt.outcome, attempt.error_type) == ("timeout", "TimeoutError")
