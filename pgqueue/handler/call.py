"""Calls the handler of one attempt: decodes its arguments, and makes an outcome of its return."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from pgqueue.context import Around, JobContext, nothing_around
from pgqueue.errors import ArgumentsError, PayloadError
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.clock import HandlerClock
from pgqueue.handler.error_reports import report
from pgqueue.handler.outcome import (
    after_error,
    log_error_after_finish,
    outcome_of,
    secrets_of,
    too_late,
    unreadable,
)
from pgqueue.middleware import AsyncAround
from pgqueue.outcomes import AttemptEnd, Failed, Outcome, TimeIsUp
from pgqueue.repository.claim import Claimed
from pgqueue.repository.declared_tasks import BY_NAME
from pgqueue.tasks import Task
from pgqueue.tasks.duplicates import running_job


def never(_: BaseException) -> bool:
    """The ``can_replay`` of an attempt without a transaction."""
    return False


def call(
    task: Task[..., Any],
    claimed: Claimed,
    context: JobContext,
    *,
    around: Around = nothing_around,
    write_pending: Callable[[], None] | None = None,
    can_replay: Callable[[BaseException], bool] = never,
) -> Outcome:
    """Call a handler in this thread, and flush the changes that are pending in its Session.

    Raises only errors for which ``can_replay`` is true.
    """
    try:
        arguments = _begin(task, claimed)
    except (PayloadError, ArgumentsError) as error:
        return unreadable(task, claimed, error)
    try:
        with around(context):
            returned = task.injection.call(task.function, context, **arguments)
            outcome = outcome_of(task, claimed, returned)
            if write_pending is not None:
                write_pending()  # a flush runs the application's own event handlers
        if write_pending is not None:
            write_pending()  # what middleware has done after its handler
        return outcome
    except BaseException as error:  # the one broad except: a user's task may raise anything
        if can_replay(error):
            raise
        return _after_raised(task, claimed, context, error)


async def call_async(
    attempt: RunningAttempt,
    context: JobContext,
    *,
    around: AsyncAround = nothing_around,
    write_pending: Callable[[], Awaitable[None]] | None = None,
    can_replay: Callable[[BaseException], bool] = never,
) -> Outcome:
    """Like :func:`call` for an async handler, on this event loop, until its clock ends it."""
    task, claimed = attempt.task, attempt.claimed
    try:
        arguments = _begin(task, claimed)
    except (PayloadError, ArgumentsError) as error:
        return unreadable(task, claimed, error)
    clock = HandlerClock(attempt)
    try:
        async with around(context):
            async with clock:
                returned = await task.injection.call(task.function, context, **arguments)
            await _raise_own_cancellation()
            outcome = outcome_of(task, claimed, returned)
            if write_pending is not None:
                await write_pending()
        if write_pending is not None:
            await write_pending()
        return outcome
    except BaseException as error:  # the one broad except: a user's task may raise anything
        if asyncio._get_running_loop() is None:
            raise  # the loop has ended before the handler, which is discarded
        with suppress(asyncio.CancelledError):
            await _raise_own_cancellation()
        if can_replay(error):
            raise
        if isinstance(error, asyncio.CancelledError) and clock.stopped_for is not None:
            return _after_raised(task, claimed, context, clock.stopped_for)
        if isinstance(error, TimeoutError) and clock.is_over:
            error.args = error.args or too_late(task, claimed).args  # asyncio gives no message
            return _after_raised(task, claimed, context, error, AttemptEnd.TIMEOUT)
        return _after_raised(task, claimed, context, error)


def _begin(task: Task[..., Any], claimed: Claimed) -> dict[str, Any]:
    """Set ``running_job``, which the handler's enqueues read, and decode the arguments."""
    running_job.set(claimed)
    try:
        return task.payload.loads(claimed.args)
    except PayloadError as error:
        if claimed.meta is None or BY_NAME not in claimed.meta:
            raise
        # Nobody has checked them.  Raise what an enqueue by the task would have raised.
        task.payload.bind((), json.loads(claimed.args))
        raise ArgumentsError(str(error)) from error


def _after_raised(
    task: Task[..., Any],
    claimed: Claimed,
    context: JobContext,
    error: BaseException,
    end: AttemptEnd = AttemptEnd.FAILED,
) -> Outcome:
    if not context.is_finished:
        end = AttemptEnd.TIMEOUT if isinstance(error, TimeIsUp) else end
        return after_error(task, claimed, error, end=end)
    reported = report(error, secrets=secrets_of(task, claimed))
    log_error_after_finish(task, claimed, reported)
    return Failed(reported)  # ctx.finish() has ended the job


async def _raise_own_cancellation() -> None:
    """Raise a handler's own cancellation inside its attempt, if no await has raised it."""
    own = asyncio.current_task()
    if own is not None and own.cancelling():
        await asyncio.sleep(0)
