"""What one attempt has come to: decides its outcome, and logs it where it is bad."""

import inspect
import logging
from collections.abc import AsyncGenerator, Generator
from dataclasses import replace
from functools import lru_cache
from threading import Lock
from typing import Any

from pgqueue import redaction
from pgqueue.arguments import OtherVersion
from pgqueue.errors import ArgumentsError, PayloadError, TaskDefinitionError
from pgqueue.handler.error_reports import log_fields, report, storable_result, storable_words
from pgqueue.outcomes import (
    AttemptEnd,
    Cancel,
    Cancelled,
    Discard,
    ErrorReport,
    Exhausted,
    Expired,
    Failed,
    Interrupted,
    Outcome,
    Released,
    Retried,
    RetryLater,
    Snooze,
    Snoozed,
    Stopped,
    Succeeded,
    Suspended,
    Unreadable,
    cause_of,
)
from pgqueue.repository.claim import Claimed
from pgqueue.repository.follow_ups import ON_SUCCESS
from pgqueue.repository.rescue import Rescued
from pgqueue.repository.settle import Attempts
from pgqueue.tasks import Task

logger = redaction.logger(__name__)

LONGEST_LINE = 300
"""Characters of an error's message in a log line."""

NOTHING_RETURNED = Succeeded()


def obstacle(
    task: Task[..., Any], attempts: Attempts, claimed: Claimed, *, in_own_transaction: bool
) -> Outcome | None:
    """Return the outcome of an attempt whose handler must not start; None if it may start.

    ``in_own_transaction``: each statement commits itself.
    """
    if claimed.is_exhausted:
        return Exhausted()
    expires_in = task.settings.expires_in
    if expires_in is not None and attempts.has_expired(claimed, expires_in):
        reason = "expired: it was not started within its expires_in"
        logger.warning(
            "job %d %s is cancelled: %s",
            claimed.job_id,
            task.name,
            reason,
            extra=log_fields(claimed),
        )
        return Expired(reason)
    if task.settings.frees_key_at_start and not attempts.free_key(
        claimed, in_own_transaction=in_own_transaction
    ):
        return Released()
    return None


def unreadable(
    task: Task[..., Any], claimed: Claimed, error: PayloadError | ArgumentsError
) -> Outcome:
    """Let a job wait if its arguments are of another version, and fail it if they are damaged or
    wrong."""
    reported = report(error, secrets=secrets_of(task, claimed))
    if isinstance(error, OtherVersion):
        log_waiting(reported.message)
        return Unreadable(reported, task.settings.max_unreadable)
    failed = Failed(reported)
    log_failure(task, claimed, failed, error)
    return failed


def outcome_of(task: Task[..., Any], claimed: Claimed, returned: Any) -> Outcome:
    """Return the outcome of an attempt whose handler has returned."""
    if returned is None:
        return Succeeded(is_followed=True) if is_followed(claimed) else NOTHING_RETURNED
    if isinstance(returned, RetryLater):
        return replace(_after_failure(task, claimed, returned), keeps_writes=True)
    if isinstance(returned, Cancel | Discard | Snooze):
        return replace(_requested_outcome(returned, secrets_of(task, claimed)), keeps_writes=True)
    if inspect.iscoroutine(returned):
        returned.close()
        raise TaskDefinitionError(
            f"task {task.name} returned a coroutine that nobody awaits; make it `async def`"
        )
    if isinstance(returned, Generator | AsyncGenerator):
        raise TaskDefinitionError(
            f"task {task.name} returned a generator, none of which has run: a decorator hides a "
            "function that uses `yield`; iterate over it in the task"
        )
    if isinstance(returned, type) and issubclass(returned, Cancel | Discard | Snooze | RetryLater):
        raise TaskDefinitionError(
            f"task {task.name} returned the class {returned.__name__}, which says nothing of this "
            f"job; return what it makes, as in `return {returned.__name__}(...)`"
        )
    return success(task, claimed, returned)


def success(task: Task[..., Any], claimed: Claimed, result: Any) -> Succeeded:
    """Return the success of a job with this result, or with a note of why it cannot be stored.

    Raises PayloadError instead if the task requires its results.
    """
    try:
        return Succeeded(storable_result(result), is_followed(claimed))
    except PayloadError as error:
        unkept = str(error)
    if task.settings.results == "required":
        raise PayloadError(
            f"job {claimed.job_id} {task.name}: its result cannot be stored: {unkept}; return "
            "less, or store it in a table of the application and return its key"
        )
    logger.warning(
        "job %d %s: it has succeeded, and its result is not kept: %s",
        claimed.job_id,
        task.name,
        unkept,
        extra=log_fields(claimed),
    )
    return Succeeded(unkept_result(unkept), is_followed(claimed))


def is_followed(claimed: Claimed) -> bool:
    """Whether another job follows the success of this one."""
    return claimed.meta is not None and ON_SUCCESS in claimed.meta


def unkept_result(reason: str) -> dict[str, str]:
    """What is stored in place of a result that cannot be stored."""
    return {"unserialisable_result": reason}


def after_error(
    task: Task[..., Any],
    claimed: Claimed,
    error: BaseException,
    *,
    end: AttemptEnd = AttemptEnd.FAILED,
) -> Outcome:
    """Return the outcome of an attempt whose handler raised, or could not start."""
    if isinstance(error, Suspended):
        return Snoozed(error.delay)
    if isinstance(error, Stopped):
        return Interrupted(task.settings.max_interruptions)
    if isinstance(error, Cancel | Discard | Snooze):
        return _requested_outcome(error, secrets_of(task, claimed))
    return _after_failure(task, claimed, error, end=end)


def _after_failure(
    task: Task[..., Any],
    claimed: Claimed,
    error: BaseException,
    *,
    end: AttemptEnd = AttemptEnd.FAILED,
) -> Retried | Failed:
    """Let the policy of the job decide, and log what it has decided."""
    cause, secrets = cause_of(error), secrets_of(task, claimed)
    outcome = task.settings.as_enqueued(claimed.meta).retry.after_failure(
        attempt=claimed.attempt,
        max_attempts=claimed.max_attempts,
        error=error,
        report=report(cause, secrets=secrets),
        end=end,
        task_name=task.name,
    )
    if isinstance(outcome, Retried) and outcome.queue is not None:
        outcome = _moved(task, claimed, outcome, outcome.queue)
    log_failure(task, claimed, outcome, cause)
    return outcome


def _moved(task: Task[..., Any], claimed: Claimed, outcome: Retried, queue: str) -> Retried:
    """Return a retry in this queue; in that of the attempt, if the job cannot move."""
    if queue == claimed.queue:
        return replace(outcome, queue=None)
    limited = task.limited_among(claimed.queue, queue)
    if limited is None:
        return outcome
    logger.warning(
        "job %d %s: it is retried in queue %s and not in %s: queue %s has limits",
        claimed.job_id,
        task.name,
        claimed.queue,
        queue,
        limited,
        extra=log_fields(claimed),
    )
    return replace(outcome, queue=None)


def after_timeout(task: Task[..., Any], claimed: Claimed) -> Outcome:
    """Return the outcome of an attempt that was ended at its timeout, from outside."""
    return after_error(task, claimed, too_late(task, claimed), end=AttemptEnd.TIMEOUT)


def too_late(task: Task[..., Any], claimed: Claimed) -> TimeoutError:
    timeout = task.settings.as_enqueued(claimed.meta).timeout
    return TimeoutError(f"the handler ran longer than {timeout}")


def after_crash(task: Task[..., Any], claimed: Claimed, reason: str) -> Outcome:
    """Return the outcome of an attempt whose child process has died.

    If the job has attempts left, it is retried at once, as after the crash of a worker; the task's
    retry policy does not apply.
    """
    error = ErrorReport("HandlerDied", reason, "")
    outcome: Retried | Failed = Retried(None, error, AttemptEnd.CRASHED)
    if claimed.attempt >= claimed.max_attempts:
        outcome = Failed(error, AttemptEnd.CRASHED)
    log_failure(task, claimed, outcome)
    return outcome


def _requested_outcome(
    request: Cancel | Discard | Snooze, secrets: tuple[str, ...]
) -> Cancelled | Failed | Snoozed:
    match request:
        case Cancel(reason=reason):
            return Cancelled(storable_words(reason, secrets=secrets))
        case Discard(reason=reason):
            words = storable_words(reason, secrets=secrets)
            return Failed(ErrorReport("Discard", words, ""), AttemptEnd.DISCARDED)
        case Snooze(delay=delay):
            return Snoozed(delay)


def secrets_of(task: Task[..., Any], claimed: Claimed) -> tuple[str, ...]:
    """Return the secret arguments of this job, which no error or log line may quote."""
    return claimed.secrets(task.settings.secret_args)


def log_failure(
    task: Task[..., Any],
    claimed: Claimed,
    outcome: Retried | Failed,
    error: BaseException | None = None,
) -> None:
    """Log a failed attempt with its error and its traceback, as they are stored.

    A last line of the traceback that only repeats the error is left out.

    The log record has the exception itself, for tools that collect errors, unless the task has
    secret arguments, which the exception may quote.
    """
    is_safe = error is not None and not secrets_of(task, claimed)
    type_name, message = outcome.error.type, _first_line(outcome.error.message)
    logger.log(
        logging.WARNING if isinstance(outcome, Retried) else logging.ERROR,
        "job %d %s: attempt %d of %d: %s: %s; %s",
        claimed.job_id,
        task.name,
        claimed.attempt,
        claimed.max_attempts,
        type_name,
        message,
        _consequence(outcome),
        exc_info=error if is_safe else None,
        extra={
            **log_fields(claimed),
            redaction.TRACEBACK: outcome.error.traceback.rstrip().removesuffix(
                f"\n{type_name}: {message}"
            ),
        },
    )


def _consequence(outcome: Retried | Failed) -> str:
    if isinstance(outcome, Failed):
        return "the job has failed"
    words = "it is retried"
    if outcome.delay:
        words += f" after {outcome.delay.total_seconds():.1f} s"
    if outcome.queue is not None:
        words += f" in queue {outcome.queue}"
    return words


def log_error_after_finish(task: Task[..., Any], claimed: Claimed, error: ErrorReport) -> None:
    """Log an error after the end of its job: no row is left to store it."""
    logger.error(
        "job %d %s: it has succeeded in ctx.finish(), and its handler has raised afterwards: %s",
        claimed.job_id,
        task.name,
        error.traceback,
        extra=log_fields(claimed),
    )


def log_final_failure(attempt: Claimed | Rescued, reason: str) -> None:
    """Log that a job has failed for good for another reason than an error of its handler."""
    logger.error(
        "job %d %s has failed: %s",
        attempt.job_id,
        attempt.task,
        _first_line(reason),
        extra=log_fields(attempt),
    )


def _first_line(message: str) -> str:
    line = message.strip().partition("\n")[0]
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."


def log_waiting(reason: str) -> None:
    """Log a reason for which jobs wait: once, not for each job and each claim."""
    with _waiting_lock:  # the cache alone would let two threads log the same reason
        _log_waiting(reason)


@lru_cache(maxsize=1000)
def _log_waiting(reason: str) -> None:
    logger.warning("%s; its jobs wait for a worker that can read them (pgqueue status)", reason)


_waiting_lock = Lock()
