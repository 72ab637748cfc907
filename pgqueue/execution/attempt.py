"""One attempt of one job: decodes its arguments, runs its handler, decides the outcome."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pgqueue import redaction
from pgqueue.context import Around, JobContext, nothing_around
from pgqueue.errors import PayloadError, TaskDefinitionError
from pgqueue.execution.error_reports import UNKEPT, report, storable_result, storable_words
from pgqueue.outcomes import (
    AttemptEnd,
    Cancel,
    Cancelled,
    Discard,
    ErrorReport,
    Failed,
    Outcome,
    Retried,
    Snooze,
    Snoozed,
    Succeeded,
    is_plain_success,
)
from pgqueue.redaction import secrets_among
from pgqueue.repository import Attempts, Claimed
from pgqueue.tasks import Task

logger = redaction.logger(__name__)


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The outcome of an attempt, and whether its handler's writes are kept."""

    outcome: Outcome
    keeps_writes: bool


NOTHING_RETURNED = AttemptResult(Succeeded(), keeps_writes=True)

INTERRUPTED = Retried(
    None,
    ErrorReport(
        "Interrupted", "The worker was stopped, and the handler did not end within the grace.", ""
    ),
    AttemptEnd.INTERRUPTED,
)
"""The outcome of an attempt that runs after the grace period, whatever the task's retry policy."""


class Stale(Exception):
    """The lease has passed to another worker: no write of this attempt may be kept."""


class CancelWins(Exception):
    """The job has been cancelled meanwhile: no write of this attempt may be kept."""


class Replay(Exception):
    """The transaction of a handler must begin again, and the handler in it."""


def never(_: BaseException) -> bool:
    return False


def run(
    task: Task[..., Any],
    claimed: Claimed,
    context: JobContext,
    *,
    around: Around = nothing_around,
    write_pending: Callable[[], None] | None = None,
    is_replayed: Callable[[BaseException], bool] = never,
) -> AttemptResult:
    """Run a handler in this thread, and flush what it left pending in its session.

    Raises Replay for an error after which the attempt goes on with a replay.
    """
    try:
        arguments = task.payload.loads(claimed.args)
    except PayloadError as error:
        return _unreadable(error, _secrets(task, claimed))
    try:
        with around(context):
            injected = task.injection.values(session=context.session, context=context)
            returned = task.function(*injected, **arguments)
            verdict = NOTHING_RETURNED if returned is None else _returned(task, claimed, returned)
            if write_pending is not None:
                write_pending()  # a flush runs the application's own event handlers
        return verdict
    except BaseException as error:  # the one broad except: a user's task may raise anything
        if is_replayed(error):
            raise Replay from error
        return AttemptResult(after_error(task, claimed, error), keeps_writes=False)


async def run_async(
    task: Task[..., Any],
    claimed: Claimed,
    context: JobContext,
    *,
    around: Around = nothing_around,
    write_pending: Callable[[], Awaitable[None]] | None = None,
    is_replayed: Callable[[BaseException], bool] = never,
) -> AttemptResult:
    """Like :func:`run` for an async handler, on this event loop."""
    try:
        arguments = task.payload.loads(claimed.args)
    except PayloadError as error:
        return _unreadable(error, _secrets(task, claimed))
    timeout, clock = task.settings.timeout, None
    try:
        with around(context):
            injected = task.injection.values(session=context.session, context=context)
            if timeout is None:
                returned = await task.function(*injected, **arguments)
            else:
                async with asyncio.timeout(timeout.total_seconds()) as clock:
                    returned = await task.function(*injected, **arguments)
            await _feel_cancellation()
            verdict = NOTHING_RETURNED if returned is None else _returned(task, claimed, returned)
            if write_pending is not None:
                await write_pending()
        return verdict
    except BaseException as error:  # the one broad except: a user's task may raise anything
        return await _after_error_on_loop(task, claimed, error, clock, is_replayed)


async def _after_error_on_loop(
    task: Task[..., Any],
    claimed: Claimed,
    error: BaseException,
    clock: asyncio.Timeout | None,
    is_replayed: Callable[[BaseException], bool],
) -> AttemptResult:
    await _forget_cancellation()
    if is_replayed(error):
        raise Replay from error
    end = _end_of(task, error, clock)
    return AttemptResult(after_error(task, claimed, error, end=end), keeps_writes=False)


async def _feel_cancellation() -> None:
    """Raise a handler's own cancellation inside its attempt, if no await has raised it."""
    own = asyncio.current_task()
    if own is not None and own.cancelling():
        await asyncio.sleep(0)


async def _forget_cancellation() -> None:
    with suppress(asyncio.CancelledError):
        await _feel_cancellation()


def too_late(task: Task[..., Any]) -> TimeoutError:
    return TimeoutError(f"the handler ran longer than {task.settings.timeout}")


def _end_of(
    task: Task[..., Any], error: BaseException, clock: asyncio.Timeout | None
) -> AttemptEnd:
    if not isinstance(error, TimeoutError) or clock is None or not clock.expired():
        return AttemptEnd.FAILED
    error.args = error.args or too_late(task).args  # asyncio gives no message
    return AttemptEnd.TIMEOUT


def after_error(
    task: Task[..., Any],
    claimed: Claimed,
    error: BaseException,
    *,
    end: AttemptEnd = AttemptEnd.FAILED,
    told: ErrorReport | None = None,
) -> Outcome:
    """The outcome of an attempt whose handler raised, or could not be started."""
    secrets = _secrets(task, claimed)
    if isinstance(error, Cancel | Discard | Snooze):
        return _asked_for(error, secrets)
    outcome = task.settings.retry.after_failure(
        attempt=claimed.attempt,
        max_attempts=claimed.max_attempts,
        error=error,
        report=told or report(error, secrets=secrets),
        end=end,
        task_name=task.name,
    )
    tell(task, claimed, outcome)
    return outcome


def after_crash(task: Task[..., Any], claimed: Claimed, reason: str) -> Outcome:
    """The outcome of an attempt whose child process has died.

    As after the crash of a worker, the job is retried at once, whatever the task's retry policy,
    if it has attempts left.
    """
    error = ErrorReport("HandlerDied", reason, "")
    outcome: Retried | Failed = Retried(None, error, AttemptEnd.CRASHED)
    if claimed.attempt >= claimed.max_attempts:
        outcome = Failed(error, AttemptEnd.CRASHED)
    logger.warning("job %d: %s", claimed.job_id, reason)
    tell(task, claimed, outcome)
    return outcome


def tell(task: Task[..., Any], claimed: Claimed, outcome: Retried | Failed) -> None:
    """Log the end of an attempt in one line: tracebacks are in the tables, arguments in no log."""
    ending = "is retried"
    if isinstance(outcome, Failed):
        ending = f"has failed (pgqueue jobs {claimed.job_id} tells why)"
    logger.log(
        logging.WARNING if isinstance(outcome, Retried) else logging.ERROR,
        "job %d %s: attempt %d of %d: %s; it %s",
        claimed.job_id,
        task.name,
        claimed.attempt,
        claimed.max_attempts,
        outcome.error.type,
        ending,
    )


def complete(
    attempts: Attempts, claimed: Claimed, outcome: Outcome, *, held: bool, is_kept: bool = True
) -> None:
    """Settle an attempt inside the handler's own transaction; the caller commits.

    ``is_kept``: whether the job's row stays if it has succeeded.
    """
    if not is_kept and isinstance(outcome, Succeeded) and _delete(attempts, claimed, held=held):
        return
    if is_plain_success(outcome):
        settled = attempts.settle_one_success(claimed, held=held)
    elif held and not attempts.take_message(claimed):
        settled = []
    else:
        settled = attempts.settle([(claimed, outcome)], held=held)
    if not settled:
        raise Stale
    if settled[0].outcome == "cancelled" and not isinstance(outcome, Cancelled):
        raise CancelWins


def _delete(attempts: Attempts, claimed: Claimed, *, held: bool) -> bool:
    if not attempts.delete_one_success(claimed, held=held):
        return False
    if held and not attempts.take_message(claimed):
        raise Stale
    return True


def _secrets(task: Task[..., Any], claimed: Claimed) -> tuple[str, ...]:
    """The secret arguments of this job, which no error or log may quote."""
    return secrets_among(claimed.args, task.settings.secret_args)


def _unreadable(error: PayloadError, secrets: tuple[str, ...]) -> AttemptResult:
    """Fail for good: arguments that cannot be decoded now cannot be decoded later."""
    return AttemptResult(Failed(report(error, secrets=secrets)), keeps_writes=False)


def _returned(task: Task[..., Any], claimed: Claimed, returned: Any) -> AttemptResult:
    if isinstance(returned, Cancel | Discard | Snooze):
        return AttemptResult(_asked_for(returned, _secrets(task, claimed)), keeps_writes=True)
    if inspect.iscoroutine(returned):
        returned.close()
        raise TaskDefinitionError(
            f"task {task.name} returned a coroutine that nobody awaits; make it `async def`"
        )
    result = storable_result(returned)
    if isinstance(result, dict) and UNKEPT in result:
        logger.warning("job %d %s: its result is not kept", claimed.job_id, task.name)
    return AttemptResult(Succeeded(result), keeps_writes=True)


def _asked_for(wish: Cancel | Discard | Snooze, secrets: tuple[str, ...]) -> Outcome:
    match wish:
        case Cancel(reason=reason):
            return Cancelled(storable_words(reason, secrets=secrets))
        case Discard(reason=reason):
            words = storable_words(reason, secrets=secrets)
            return Failed(ErrorReport("Discard", words, ""), AttemptEnd.DISCARDED)
        case Snooze(delay=delay):
            return Snoozed(delay)
