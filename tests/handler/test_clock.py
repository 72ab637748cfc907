"""An async handler that is told to stop gets CancelledError, once, and ends as it was told."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from pgqueue import Cancel, JobContext, PgQueue, Retry
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.call import call_async
from pgqueue.handler.run import NO_CONTEXT
from pgqueue.outcomes import AttemptEnd, Cancelled, Failed, Interrupted, Outcome, Stopped, Succeeded
from pgqueue.repository.claim import Claimed


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


def attempt_of(
    handler: Callable[[], Awaitable[Any]], timeout: timedelta | None = None
) -> RunningAttempt:
    task = PgQueue().task(name="t", timeout=timeout, retry=Retry.never())(handler)
    claimed = Claimed(5, "", 1, 1, "default", "t", "{}", 1, 1, 0)
    return RunningAttempt(claimed, task, worker_id=uuid.uuid4(), stopping=Event())


def outcome_of(attempt: RunningAttempt, **options: Any) -> Outcome:
    return asyncio.run(call_async(attempt, NO_CONTEXT, **options))


def stop_from_a_thread(attempt: RunningAttempt, reason: BaseException) -> None:
    thread = Thread(target=attempt.ask_to_stop, args=(reason,))
    thread.start()
    thread.join()


def test_a_handler_is_interrupted_from_another_thread_and_cleans_up() -> None:
    seen: list[str] = []

    async def handle() -> None:
        stop_from_a_thread(attempt, Cancel("enough"))
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    attempt = attempt_of(handle)

    assert outcome_of(attempt) == Cancelled("enough")
    assert seen == ["cleaned up"]


def test_a_handler_that_is_told_before_it_begins_ends_at_its_first_await() -> None:
    attempt = attempt_of(wait_for_ever)
    attempt.ask_to_stop(Cancel())

    assert outcome_of(attempt) == Cancelled("")


def test_a_handler_whose_attempt_is_taken_away_is_interrupted() -> None:
    async def handle() -> None:
        attempt.lose()
        await asyncio.Event().wait()

    attempt = attempt_of(handle)

    assert outcome_of(attempt) == Cancelled("")
    assert attempt.is_lost


def test_a_stop_at_the_end_of_the_grace_period_is_an_interruption() -> None:
    attempt = attempt_of(wait_for_ever)
    attempt.ask_to_stop(Stopped())

    assert outcome_of(attempt) == Interrupted(attempt.task.settings.max_interruptions)


def test_a_handler_that_suppresses_its_cancellation_goes_on_with_its_own_outcome() -> None:
    async def handle() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return "done"

    attempt = attempt_of(handle)
    attempt.ask_to_stop(Stopped())

    assert outcome_of(attempt) == Succeeded("done")


def test_a_stop_after_the_timeout_leaves_the_outcome_a_timeout() -> None:
    async def handle() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            attempt.ask_to_stop(Stopped())
            await asyncio.sleep(0)

    attempt = attempt_of(handle, timeout=timedelta(milliseconds=1))

    outcome = outcome_of(attempt)

    assert isinstance(outcome, Failed)
    assert outcome.end is AttemptEnd.TIMEOUT


def test_a_stop_that_comes_after_the_handler_changes_nothing() -> None:
    async def handle() -> str:
        attempt.ask_to_stop(Cancel())
        return "done"

    @asynccontextmanager
    async def around(_: JobContext) -> AsyncIterator[None]:
        yield
        await asyncio.sleep(0)  # the interruption comes

    attempt = attempt_of(handle)

    assert outcome_of(attempt, around=around) == Succeeded("done")


def test_middleware_sees_the_cancellation_and_no_timeout() -> None:
    seen: list[type[BaseException]] = []

    @asynccontextmanager
    async def around(_: JobContext) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            seen.append(type(error))
            raise

    attempt = attempt_of(wait_for_ever, timeout=timedelta(hours=1))
    attempt.ask_to_stop(Cancel())

    outcome_of(attempt, around=around)

    assert seen == [asyncio.CancelledError]


def test_a_commit_is_not_interrupted_and_the_handler_is_after_it() -> None:
    seen: list[str] = []

    async def handle() -> None:
        with attempt.committing():
            attempt.ask_to_stop(Cancel())
            for _ in range(3):
                await asyncio.sleep(0)
            seen.append("committed")
        await asyncio.Event().wait()

    attempt = attempt_of(handle)

    assert outcome_of(attempt) == Cancelled("")
    assert seen == ["committed"]


def test_a_timeout_that_passes_during_a_commit_comes_after_it() -> None:
    seen: list[str] = []

    async def handle() -> None:
        with attempt.committing():
            await asyncio.sleep(0.01)
            seen.append("committed")
        await asyncio.Event().wait()

    attempt = attempt_of(handle, timeout=timedelta(milliseconds=1))

    outcome = outcome_of(attempt)

    assert isinstance(outcome, Failed)
    assert outcome.end is AttemptEnd.TIMEOUT
    assert seen == ["committed"]


def test_a_handler_that_outlives_its_loop_is_told_without_an_error() -> None:
    async def begin() -> None:
        left.append(asyncio.create_task(call_async(attempt, NO_CONTEXT)))
        await asyncio.sleep(0)

    attempt, left = attempt_of(wait_for_ever), list[asyncio.Task[Outcome]]()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()

    attempt.ask_to_stop(Cancel())

    left[0].get_coro().close()
