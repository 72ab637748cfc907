"""The transaction of a handler on a connection of the pool."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from sqlalchemy import Connection, Engine
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from pgqueue import redaction
from pgqueue.database.handlers import listeners_to_commit
from pgqueue.database.opening import (
    connect,
    errors_of_listeners,
    leave_autocommit,
    let_server_notice_loss,
)
from pgqueue.database.unit_of_work import (
    CommitUnknown,
    TransactionEnded,
    begin_for_handler,
    commit,
    set_now,
    time_limits,
)
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.transaction import AttemptTransaction, call_listener
from pgqueue.outcomes import Outcome
from pgqueue.repository.fate import Fate
from pgqueue.repository.transactions import AFTER_HANDLER, AFTER_SUCCESS
from pgqueue.worker.outage import is_away
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.unknown_commits import fate_of

logger = redaction.logger(__name__)

MOST_REPLAYS = 5
KEPT_FOR = 0.1
"""Seconds for which a slot keeps its connection."""
BEGIN_WITHIN = 10.0
"""Seconds for which ``ctx.finish()`` waits for the database."""
BEGIN_AGAIN = 0.1
LOST = "the connection broke during COMMIT, which was not carried out"
NOBODY_KNOWS = (
    "the connection broke during COMMIT, and this server cannot say whether it was carried out: "
    "there was a failover, or no answer for a minute"
)


class KeptConnection:
    """The connection of a slot, kept from one job to the next while jobs wait for the slot.

    To take a connection from the pool and to give it back takes as long as a tenth of a quick job.
    Not kept: after an error, for longer than KEPT_FOR, so that no slot starves others where the
    pool is small, and where the application listens to its connections.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.held: Connection | None = None
        self._until = 0.0

    def take(self) -> Connection:
        """The kept connection, or one of the pool."""
        kept, self.held = self.held, None
        if kept is not None and time.monotonic() < self._until:
            return kept
        if kept is not None:
            kept.close()
        self._until = time.monotonic() + KEPT_FOR
        return _opened(self._engine)

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose transaction has ended well, or give it back to the pool."""
        if self._is_heard or connection.in_transaction() or time.monotonic() >= self._until:
            connection.close()
        else:
            self.held = connection

    def close(self) -> None:
        """Give the connection back to the pool: the slot waits for a job."""
        kept, self.held = self.held, None
        if kept is not None:
            kept.close()

    @property
    def _is_heard(self) -> bool:
        """Whether the application is told when a connection is taken and given back."""
        pool = self._engine.pool.dispatch
        of_pool = (pool.checkout, pool.checkin, pool.reset)
        return any(map(bool, (*of_pool, self._engine.dispatch.engine_connect)))


def _opened(engine: Engine, isolation_level: IsolationLevel | None = None) -> Connection:
    """A connection of the pool.

    ``isolation_level``: for an async handler; the BEGIN that the worker sends itself, with the
    level, is for plain connections.
    """
    with errors_of_listeners():
        connection = connect(engine)
    try:
        if isolation_level is not None:
            connection.execution_options(isolation_level=isolation_level)
        else:
            leave_autocommit(connection)
        let_server_notice_loss(connection)
    except BaseException:
        connection.close()
        raise
    return connection


class PoolTransaction(AttemptTransaction):
    """A transaction on a connection of the engine's pool.

    It begins again after a serialization failure or a deadlock.  A job with ``max_attempts=1`` is
    not replayed: its handler must not start twice.
    """

    def __init__(
        self, runtime: WorkerRuntime, attempt: RunningAttempt, kept: KeptConnection | None = None
    ) -> None:
        """``kept``: that of the slot, if its next handler may have the connection of this one."""
        super().__init__(attempt, runtime.sessions, is_kept=runtime.is_kept(attempt.claimed))
        self._runtime = runtime
        self._kept = kept
        self.max_replays = MOST_REPLAYS if attempt.claimed.max_attempts > 1 else 0

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        runtime, attempt, kept = self._runtime, self.attempt, self._kept
        if kept is not None:
            connection = kept.take()
        elif attempt.task.is_async:
            connection = _opened(runtime.loop.engine.sync_engine, runtime.isolation_level)
        else:
            connection = _opened(runtime.engine)
        is_sound = False
        try:
            with self._used(connection):
                yield connection
            is_sound = not attempt.is_lost
        finally:
            if kept is not None and is_sound:
                kept.give_back(connection)
            else:
                connection.close()

    @contextmanager
    def _used(self, connection: Connection) -> Iterator[None]:
        """Roll back what is left at the end."""
        attempt = self.attempt
        try:
            with attempt.on(connection):
                yield
                if (left := connection.get_transaction()) is not None:
                    left.rollback()
        finally:
            if attempt.session is not None:
                attempt.session.close()
            # Another thread may have ended the server process of a lost attempt.
            if attempt.is_lost and not connection.closed and not connection.invalidated:
                connection.invalidate()

    @contextmanager
    def begun(self) -> Iterator[Connection]:
        """As for transactional handlers, a connection that has broken in the pool is replaced.

        Their job can be released, and claimed again.  Here the handler may have called a service,
        so it waits while the database is away, for some seconds.
        """
        deadline = time.monotonic() + BEGIN_WITHIN
        with ExitStack() as opened:
            while True:
                try:
                    connection = opened.enter_context(self.connection())
                    self.begin(connection)
                    break
                except DBAPIError as error:
                    opened.close()
                    is_over = time.monotonic() > deadline or self.attempt.is_lost
                    if is_over or not is_away(error):
                        raise
                    self._runtime.outage.record_error(
                        error, name=f"job {self.attempt.claimed.job_id}", opened_at=float("-inf")
                    )
                    self.attempt.wait_for(partial(time.sleep, BEGIN_AGAIN))
            yield connection

    def begin(self, connection: Connection) -> None:
        limits = time_limits(self.attempt.settings.timeout, connection)
        level = self._runtime.isolation_level
        begin_for_handler(connection, limits, isolation_level=level)

    def end_handler(self, connection: Connection, *, is_plain_success: bool = False) -> None:
        if connection.get_transaction() is None or connection.invalidated:
            raise TransactionEnded("by the handler, or with its connection")
        set_now(connection, AFTER_SUCCESS if is_plain_success else AFTER_HANDLER)

    def commit_writes(self, connection: Connection) -> None:
        try:
            commit(connection)
        except CommitUnknown as error:
            runtime, attempt = self._runtime, self.attempt
            attempt.leave_connection()
            assert self.transaction_name is not None, "settled before the COMMIT"
            ask = partial(fate_of, runtime.engine, self.transaction_name, attempt.claimed.job_id)
            fate = attempt.wait_for(partial(ask, stopping=runtime.stopping))
            if fate is not Fate.COMMITTED:
                # If it was carried out after all, the lease is gone and the outcome is dropped.
                raise ConnectionError(LOST if fate is Fate.ABORTED else NOBODY_KNOWS) from error

    def note_settled(self, outcome: Outcome, job_outcome: str | None) -> None:
        self.attempt.ended_at = time.monotonic()
        self.attempt.is_committed = True
        claimed, ledger = self.attempt.claimed, self._runtime.ledger
        ledger.note_times(self.attempt)
        ledger.settled([(claimed, outcome)], {claimed.job_id: job_outcome})

    def call_listeners(self, session: Session) -> None:
        """Call them inside what a framework puts around handlers."""
        listeners = listeners_to_commit(session)
        if not listeners:
            return
        context = self.attempt.context(session)
        try:
            with self._runtime.around(context):
                for listener in listeners:
                    call_listener(listener, context.job_id, session)
        except BaseException:  # ``around`` is the application's code
            logger.exception("job %d: around its after_commit listeners", context.job_id)
        session.close()
