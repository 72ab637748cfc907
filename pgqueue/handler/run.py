"""Runs one attempt, in order: connect, begin, Session, handler, flush, settle, COMMIT."""

from functools import partial
from typing import Protocol

from sqlalchemy.util import await_only, greenlet_spawn

from pgqueue.context import Around, JobContext, nothing_around
from pgqueue.database.unit_of_work import write_pending
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.call import call, call_async
from pgqueue.handler.finishing import AttemptFinishing
from pgqueue.handler.steps import AttemptSteps
from pgqueue.handler.transaction import (
    AttemptTransaction,
    CancelWins,
    is_conflict,
    prepare_replay,
)
from pgqueue.middleware import AsyncAround
from pgqueue.outcomes import Cancelled, Exhausted, Outcome

NO_CONTEXT = JobContext(0, 0, 0, "", "")
"""For handlers that ask for no context, if nothing around them asks for one."""


class Host(Protocol):
    """What an attempt takes from the slot that runs it: a slot of a worker, or that of a test."""

    around: Around
    """What to enter around each handler."""
    around_async: AsyncAround
    around_finish: Around
    """What to enter around each block of ``ctx.finish()``."""
    application: str
    """The name of the application."""

    def ask_before_start(self, attempt: RunningAttempt) -> Outcome | None:
        """Ask the database whether a handler may start, as the options of its task demand.

        Returns the outcome if it may not.
        """

    def run_in_child(self, attempt: RunningAttempt) -> Outcome:
        """Run a handler in a child process."""

    def transaction(self, attempt: RunningAttempt) -> AttemptTransaction:
        """A transaction for a handler, which begins when it is used."""


def run_attempt(attempt: RunningAttempt, host: Host) -> Outcome | None:
    """Run one attempt.  Returns its outcome, to be settled; None if nothing is left to settle.

    For an async handler, call this function by ``greenlet_spawn``.  Raises LeasePassedOn, and
    errors of the database outside of the handler.
    """
    task, claimed = attempt.task, attempt.claimed
    if claimed.is_exhausted:
        return Exhausted()
    if task.asks_before_start:
        outcome = attempt.wait_for(partial(host.ask_before_start, attempt))
        if outcome is not None:
            return outcome
    if task.in_process:
        attempt.steps = _steps(attempt, host)  # for a test; a child process makes its own
        return host.run_in_child(attempt)
    if task.is_transactional:
        try:
            return run_in_transaction(attempt, host)
        except CancelWins:
            return Cancelled("")
    context = _context(attempt, host)
    if task.is_async:
        return await_only(call_async(attempt, context, around=host.around_async))
    return call(task, claimed, context, around=host.around)


async def run_async_attempt(attempt: RunningAttempt, host: Host) -> Outcome | None:
    """Run one attempt of an async handler, on its event loop, as :func:`run_attempt` does.

    Uses a greenlet only if the attempt needs the database, or the job is exhausted.  An async
    handler never runs in a child process.
    """
    task, claimed = attempt.task, attempt.claimed
    needs_database = task.is_transactional or task.asks_before_start
    if needs_database or claimed.is_exhausted:
        return await greenlet_spawn(run_attempt, attempt, host)
    context = _context(attempt, host)
    return await call_async(attempt, context, around=host.around_async)


def _context(attempt: RunningAttempt, host: Host) -> JobContext:
    """Return the context, and prepare ``ctx.finish()``.

    ``host.around`` and ``host.around_async`` are both empty, or neither is.
    """
    if not attempt.task.injection.parameters and host.around is nothing_around:
        return NO_CONTEXT
    attempt.finishing = AttemptFinishing(attempt, host.transaction, host.around_finish)
    attempt.steps = _steps(attempt, host)
    return attempt.context()


def _steps(attempt: RunningAttempt, host: Host) -> AttemptSteps:
    return AttemptSteps(attempt, host.transaction, host.around_finish, host.application)


def run_in_transaction(attempt: RunningAttempt, host: Host) -> Outcome | None:
    """Run a handler in a transaction and commit it with its outcome.

    Returns an outcome for which nothing was committed; None if nothing is left to settle.  Raises
    LeasePassedOn or CancelWins.
    """
    task, claimed = attempt.task, attempt.claimed
    transaction, replays = host.transaction(attempt), 0

    def can_replay(error: BaseException) -> bool:
        return replays < transaction.max_replays and is_conflict(error) and not attempt.is_lost

    with transaction.connection() as connection:
        while True:
            try:
                transaction.begin(connection)
                with transaction.session(connection) as session:
                    attempt.begin()
                    context = attempt.context(session)
                    if task.is_async:
                        running = call_async(
                            attempt,
                            context,
                            around=host.around_async,
                            write_pending=partial(session.run_sync, write_pending),
                            can_replay=can_replay,
                        )
                        outcome = await_only(running)
                    else:
                        outcome = call(
                            task,
                            claimed,
                            context,
                            around=host.around,
                            write_pending=partial(write_pending, session),
                            can_replay=can_replay,
                        )
                    # Otherwise it is kept: its ``after_commit`` listeners may use it.
                    if not outcome.keeps_writes:
                        attempt.forget_session()
                if not outcome.keeps_writes:
                    return outcome
                if attempt.is_lost:
                    return None  # another thread settles the attempt
                job_outcome = transaction.settle(connection, outcome)
                transaction.commit_writes(connection)
            except Exception as error:
                if not can_replay(error):
                    raise
                replays += 1
                prepare_replay(attempt, connection, error, replays, transaction.max_replays)
                continue
            transaction.note_settled(outcome, job_outcome)
            if attempt.session is not None:
                transaction.call_listeners(attempt.session)
            return None
