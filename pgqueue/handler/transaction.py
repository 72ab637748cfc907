"""The transaction in which a handler writes and its job is settled.

A transactional handler has one COMMIT for its writes, the jobs it enqueues and its outcome.  The
settle runs inside the handler's transaction, right before its COMMIT.  If the lease has passed on
meanwhile, the settle finds no row and all writes of the handler are rolled back.
"""

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.orm import Session, sessionmaker

from pgqueue import redaction
from pgqueue.database.async_sessions import joined_session as joined_async_session
from pgqueue.database.handlers import joined_session, options_of
from pgqueue.database.sqlstates import DEADLOCK, SERIALIZATION_FAILURE, sqlstate_of
from pgqueue.database.two_phase import commit_in_two_phases
from pgqueue.database.unit_of_work import TransactionEnded
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.error_reports import log_fields
from pgqueue.outcomes import Cancel, Cancelled, Outcome, is_plain_success, may_be_deleted
from pgqueue.repository.claim import Claimed
from pgqueue.repository.settle import Attempts
from pgqueue.tasks.delaying import handler_session

logger = redaction.logger(__name__)

FIRST_PAUSE = 0.02
"""Seconds; doubles with each replay."""

FAILURES = (TransactionEnded, DBAPIError, InvalidRequestError, ConnectionError)
"""Errors of the settle and of the COMMIT.  A handler causes errors of the settle, for example by a
violated deferred constraint or an ended savepoint."""


class LeasePassedOn(Exception):
    """The lease has passed to another worker: no write of this attempt may be kept."""


class CancelWins(Cancel):
    """The job has been cancelled meanwhile: no write of this attempt may be kept.

    The attempt ends as if its handler had raised Cancel.
    """


class AttemptTransaction(ABC):
    """The transaction of one attempt: of a connection of its own, or a savepoint of a test."""

    max_replays = 0
    """How often it may begin again after a serialization failure or a deadlock."""

    def __init__(
        self, attempt: RunningAttempt, sessions: sessionmaker[Session], *, is_kept: bool
    ) -> None:
        """``is_kept``: whether the job's row stays if it has succeeded."""
        self.attempt = attempt
        self.transaction_name: str | None = None
        """By which the fate of the transaction is read; None before the settle."""
        self._sessions = sessions
        self._is_kept = is_kept

    @abstractmethod
    def connection(self) -> AbstractContextManager[Connection]:
        """A connection for the transaction; what is not committed at the end is rolled back."""

    @abstractmethod
    def begin(self, connection: Connection) -> None:
        """Begin the transaction; begin it again after a rollback by the handler's Session."""

    @contextmanager
    def begun(self) -> Iterator[Connection]:
        """A connection on which the transaction has begun."""
        with self.connection() as connection:
            self.begin(connection)
            yield connection

    @abstractmethod
    def end_handler(self, connection: Connection, *, is_plain_success: bool = False) -> None:
        """Prepare for the settle; raises TransactionEnded if the handler ended the transaction.

        ``is_plain_success``: nothing follows but :meth:`Attempts.settle_one_success`.
        """

    @abstractmethod
    def commit_writes(self, connection: Connection) -> None:
        """Commit the transaction; raises ConnectionError if it was lost with the connection, or if
        nobody knows."""

    @abstractmethod
    def note_settled(self, outcome: Outcome, job_outcome: str | None) -> None:
        """Note that the attempt is settled and committed; ``job_outcome``: how its job has ended,
        if it has."""

    @abstractmethod
    def call_listeners(self, session: Session) -> None:
        """Call the ``after_commit`` listeners of the handler's Session, after the COMMIT."""

    @contextmanager
    def session(self, connection: Connection) -> Iterator[Any]:
        """Join the handler's Session, or AsyncSession, to the transaction, with the options of the
        application's engine, and let ``delay()`` know of it.

        The Session itself is ``attempt.session`` until :meth:`connection` ends.
        """
        join = joined_async_session if self.attempt.task.is_async else joined_session
        with options_of(self._sessions.kw["bind"], connection):
            session: Any = join(self._sessions, connection, begin_again=self.begin)
            self.attempt.session = getattr(session, "sync_session", session)
            handler_session.set(self.attempt.session)
            try:
                yield session
            finally:
                handler_session.set(None)

    def settle(self, connection: Connection, outcome: Outcome) -> str | None:
        """Settle the attempt after its handler; returns how its job has ended, if it has.

        Raises LeasePassedOn, CancelWins or TransactionEnded.
        """
        self.end_handler(connection, is_plain_success=self._is_kept and is_plain_success(outcome))
        commit_in_two_phases(connection)
        attempts, claimed = Attempts(connection, self.attempt.worker_id), self.attempt.claimed
        job_outcome = settle_in_transaction(attempts, claimed, outcome, is_kept=self._is_kept)
        self.transaction_name = attempts.transaction
        return job_outcome


def settle_in_transaction(
    attempts: Attempts, claimed: Claimed, outcome: Outcome, *, is_kept: bool = True
) -> str | None:
    """Settle an attempt inside the handler's transaction; the caller commits.

    ``is_kept``: whether the row of a succeeded job stays.  Returns how the job has ended, if it
    has.  Raises LeasePassedOn or CancelWins.
    """
    is_deleted = not is_kept and may_be_deleted(outcome)
    if is_deleted and attempts.delete_one_success(claimed):
        return "succeeded"
    if is_plain_success(outcome):
        settled = attempts.settle_one_success(claimed)
    else:
        settled = attempts.settle([(claimed, outcome)])
    if not settled:
        raise LeasePassedOn
    job_outcome = settled[claimed.job_id]
    if job_outcome == "cancelled" and not isinstance(outcome, Cancelled):
        raise CancelWins
    return job_outcome


def is_conflict(error: BaseException) -> bool:
    """Whether a transaction that failed with this error may succeed if it begins again."""
    return sqlstate_of(error) in (SERIALIZATION_FAILURE, DEADLOCK)


def prepare_replay(
    attempt: RunningAttempt, connection: Connection, error: Exception, number: int, limit: int
) -> None:
    """End the failed transaction before the next begins; raises LeasePassedOn or CancelWins.

    A REPEATABLE READ transaction fails at rows that others have changed since it began.  The change
    may be the rescue of the attempt's lease or the cancel of its job: the handler must then not run
    again.
    """
    attempt.forget_session()
    connection.rollback()
    is_cancelled = Attempts(connection, attempt.worker_id).is_cancelled(attempt.claimed)
    connection.rollback()
    if is_cancelled is None:
        raise LeasePassedOn
    if is_cancelled:
        raise CancelWins
    logger.info(
        "job %d %s: attempt %d begins again (%d of %d): %s",
        attempt.claimed.job_id,
        attempt.task.name,
        attempt.claimed.attempt,
        number,
        limit,
        getattr(error, "orig", error),
        extra=log_fields(attempt.claimed),
    )
    # A pause, so that the conflicting transactions do not meet again.
    pause = FIRST_PAUSE * 2.0**number * random.uniform(0.25, 0.5)  # noqa: S311  # no secret
    attempt.wait_for(partial(time.sleep, pause))


def call_listener(listener: Callable[[Session], None], job_id: int, session: Session) -> None:
    """Call an ``after_commit`` listener of a Session after the COMMIT; its error is only logged."""
    try:
        listener(session)
    except BaseException:  # a listener may raise anything, as a handler may
        logger.exception(
            "job %d: it is committed, and a listener to after_commit has failed", job_id
        )
