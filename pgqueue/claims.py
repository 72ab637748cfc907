"""Claims in the caller's own transaction: ``queue.claim()``.

Runs the claim and the settle of the workers in the transaction of a Session.  The lease of such a
claim is never committed, so nobody else sees it.  If the transaction does not commit, the job is
free again, and the attempt was not counted.
"""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event
from typing import Any

from sqlalchemy import Connection, event, select
from sqlalchemy.orm import Session

from pgqueue import redaction
from pgqueue.context import JobContext
from pgqueue.database import async_sessions
from pgqueue.database.autocommit import refuse_autocommit
from pgqueue.database.callers import joined, may_notify, sync_session, translated_errors
from pgqueue.errors import PayloadError, PgQueueError
from pgqueue.events import AttemptCallback, AttemptEnded, AttemptOutcome, attempt_outcome
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.ended import event_of, log_job_failure, since_due
from pgqueue.handler.outcome import after_error, log_final_failure, obstacle, outcome_of, unreadable
from pgqueue.handler.transaction import LeasePassedOn, settle_in_transaction
from pgqueue.meta import read_meta
from pgqueue.middleware import around_async_handlers, around_handlers
from pgqueue.outcomes import Cancelled, Outcome, Released, Succeeded
from pgqueue.repository.claim import ClaimCursor, Claimed
from pgqueue.repository.settle import Attempts
from pgqueue.repository.tables import CRASHED, notify
from pgqueue.repository.workers import Workers
from pgqueue.rules.retention import Retention
from pgqueue.tasks import Task
from pgqueue.tasks.duplicates import running_job
from pgqueue.tasks.pauses import open_tasks

logger = redaction.logger(__name__)

WHERE = "queue.claim()"

MOST_ENDED, LONGEST_ENDING = 500, 2.0
"""Jobs that cannot run and that one claim ends, and the seconds that this may take."""


class ClaimedJob:
    """A job that a ``with`` block of :meth:`PgQueue.claim` runs."""

    def __init__(
        self, running: RunningAttempt, args: dict[str, Any], session: Any, layers: Sequence[Any]
    ) -> None:
        claimed = running.claimed
        self.task: Task[..., Any] = running.task
        self.job_id: int = claimed.job_id
        self.args = args
        """The arguments by name, decoded."""
        self.attempt: int = claimed.attempt
        self.max_attempts: int = claimed.max_attempts
        self.meta: dict[str, Any] = read_meta(claimed.meta)
        self.result: Any = None
        """Set it to store it as ``job.result``."""
        self.outcome: AttemptOutcome | None = None
        """How the attempt has ended; None inside of the block."""
        self._running = running
        self._session = session
        self._layers = layers

    def run(self) -> Any:
        """Call the handler with the Session, inside of the middlewares of the queue.

        Its return value becomes ``result``.  The options ``timeout``, ``executor`` and
        ``memory_limit`` do not apply.

        Returns:
            What the handler returns; with an AsyncSession, a coroutine to await.

        Raises:
            PgQueueError: The handler is async, and the Session is not.
        """
        if hasattr(self._session, "run_sync"):
            return self._run_async()
        if self.task.is_async:
            raise PgQueueError(
                f"{WHERE}: job {self.job_id} {self.task.name} has an async handler; claim it with "
                "an AsyncSession, and `await claimed.run()`"
            )
        return self._call(self._session)

    def _call(self, session: Session) -> Any:
        with self._running_in(session) as context, around_handlers(self._layers)(context):
            self.result = self.task.injection.call(self.task.function, context, **self.args)
        return self.result

    async def _run_async(self) -> Any:
        if not self.task.is_async:
            return await self._session.run_sync(self._call)
        function, call = self.task.function, self.task.injection.call
        with self._running_in(self._session) as context:
            async with around_async_handlers(self._layers)(context):
                self.result = await call(function, context, **self.args)
        return self.result

    @contextmanager
    def _running_in(self, session: Any) -> Iterator[JobContext]:
        """Note that this thread or asyncio task runs the job, while its handler runs."""
        running_job.set(self._running.claimed)
        try:
            yield self._running.context(session)
        finally:
            running_job.set(None)


class OpenClaim:
    """One claim: a ``with`` block, or ``async with`` for an AsyncSession."""

    def __init__(
        self,
        session: Any,
        queues: Sequence[str],
        *,
        tasks: Mapping[str, Task[..., Any]],
        retention: Retention,
        layers: Sequence[Any],
        resources: Mapping[Any, Any],
        callbacks: Sequence[AttemptCallback],
        notify: bool,
    ) -> None:
        self._given = session
        """A Session, an AsyncSession, or a registry of them."""
        self._queues = queues
        self._tasks = tasks
        self._retention = retention
        self._layers = layers
        self._resources = resources
        self._callbacks = callbacks
        self._notify = notify
        self.has_more: bool = False
        """Whether the block got None although other jobs may be due: so many that cannot run were
        ended before them that it is time to commit, and to claim again."""

    def __enter__(self) -> ClaimedJob | None:
        session = sync_session(self._given, WHERE)
        self._block = self._opened(session, session)
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> bool:
        return bool(self._block.__exit__(*error))

    async def __aenter__(self) -> ClaimedJob | None:
        self._actual = async_sessions.actual(self._given, WHERE)

        def enter(session: Session) -> ClaimedJob | None:
            self._block = self._opened(session, self._actual)
            return self._block.__enter__()

        return await self._actual.run_sync(enter)

    async def __aexit__(self, *error: Any) -> bool:
        return bool(await self._actual.run_sync(lambda _: self._block.__exit__(*error)))

    @contextmanager
    def _opened(self, session: Session, given: Any) -> Iterator[ClaimedJob | None]:
        connection = joined(session, WHERE)
        refuse_autocommit(connection, WHERE, instead="a claim needs a transaction")
        with translated_errors():
            attempts = Attempts(connection, worker_id := uuid.uuid4())
            found = self._next(session, connection, attempts)
        if found is None:
            yield None
            return
        claimed, args, waited = found
        task = self._tasks[claimed.task]
        running = RunningAttempt(
            claimed, task, worker_id=worker_id, stopping=Event(), resources=self._resources
        )
        job = ClaimedJob(running, args, given, self._layers)

        def transactions() -> tuple[object, object]:
            # Code may end that of the connection behind the Session's back.
            return session.get_transaction(), connection.get_transaction()

        at_start = transactions()
        session.info[OPEN] = session.info.get(OPEN, 0) + 1
        try:
            with session.begin_nested():
                yield job
                if transactions() != at_start:
                    raise PgQueueError("nothing was settled")
                session.flush()
                outcome = outcome_of(task, claimed, job.result)
                is_kept = not self._retention.deletes_at_once(claimed.task, claimed.queue)
                job_outcome = settle_in_transaction(attempts, claimed, outcome, is_kept=is_kept)
        except Exception as error:
            if transactions() != at_start:
                raise PgQueueError(
                    f"{WHERE}: the transaction has ended inside of the `with` block, so job "
                    f"{job.job_id} was not settled; commit after the block.  If it was committed, "
                    "a worker, or a claim that finds nothing else to run, records the attempt as "
                    "crashed and runs the job again"
                ) from error
            if connection.invalidated:
                raise  # the server has undone all, and the job is free again
            is_deleted = isinstance(error, LeasePassedOn)
            outcome = Cancelled("") if is_deleted else after_error(task, claimed, error)
            job_outcome = attempts.settle([(claimed, outcome)]).get(job.job_id, "cancelled")
        except BaseException:
            # The caller rolls back.  If it commits all the same, the job must not stay leased.
            with suppress(Exception):
                attempts.settle([(claimed, Released())])
            raise
        finally:
            session.info[OPEN] -= 1
        ran = timedelta(seconds=time.monotonic() - running.started_at)
        self._ended(session, connection, claimed, outcome, job_outcome, waited=waited, ran=ran)
        job.outcome = attempt_outcome(outcome, job_outcome)

    def _next(
        self, session: Session, connection: Connection, attempts: Attempts
    ) -> tuple[Claimed, dict[str, Any], timedelta | None] | None:
        """Claim the first due job that can run, and settle the due jobs before it that cannot.

        A job cannot run if it is too late to start, if crashes have used up its attempts, or if its
        arguments cannot be decoded.  They are settled in the caller's transaction, so after some of
        them the caller is to commit: what is undone would never get less.
        """
        ended, until = 0, time.monotonic() + LONGEST_ENDING
        has_rescued = False
        paused = Workers(connection).paused()
        tasks = open_tasks(self._tasks, paused)
        queues = [queue for queue in self._queues if queue not in paused.queues]
        pairs = [ClaimCursor(queue, priority) for priority in range(10) for queue in queues]
        while True:
            self.has_more = ended >= MOST_ENDED or (ended > 0 and time.monotonic() >= until)
            if self.has_more:
                return None
            claim = attempts.claim(pairs, tasks=tasks, limit=1, registered=False)
            if not claim.taken:
                if has_rescued or not self._rescued(session, connection):
                    return None
                has_rescued = True
            for claimed in claim.rows:
                task, waited = self._tasks[claimed.task], since_due(claimed, claim.read_at)
                outcome = obstacle(task, attempts, claimed, in_own_transaction=False)
                if outcome is None:
                    try:
                        return claimed, task.payload.loads(claimed.args), waited
                    except PayloadError as error:
                        outcome = unreadable(task, claimed, error)
                for job_outcome in attempts.settle([(claimed, outcome)]).values():
                    self._ended(session, connection, claimed, outcome, job_outcome)
                ended += 1

    def _rescued(self, session: Session, connection: Connection) -> bool:
        """Rescue the jobs of claims that were committed before their end, and of dead workers:
        where no worker runs, nobody else does.  Returns whether there were any.

        Not inside of the block of another claim, whose lease would look like one of these.
        """
        found = [] if session.info.get(OPEN) else Workers(connection).rescue()
        for attempt in found:
            if attempt.outcome == AttemptOutcome.FAILED:
                log_final_failure(attempt, CRASHED)
        return bool(found)

    def _ended(
        self,
        session: Session,
        connection: Connection,
        claimed: Claimed,
        outcome: Outcome,
        job_outcome: str | None,
        *,
        waited: timedelta | None = None,
        ran: timedelta | None = None,
    ) -> None:
        """Log a failure, wake workers for a job that goes on, and tell the callbacks after the
        COMMIT."""
        if job_outcome == AttemptOutcome.FAILED:
            log_job_failure(claimed, outcome)
        goes_on = not isinstance(outcome, Succeeded | Cancelled)  # a failed job has a follow-up
        if goes_on and self._notify and may_notify(connection):
            connection.execute(select(notify("rewind")))
        if self._callbacks:
            ended = event_of(claimed, outcome, job_outcome, waited=waited, ran=ran)
            _tell_after_commit(session, self._callbacks, ended)


OPEN = "pgqueue_open_claims"
"""The key, in the ``info`` of a Session, of how many blocks are open."""
ENDED = "pgqueue_ended_attempts"
"""The key, in the ``info`` of a Session, of what to tell after its COMMIT."""


def _tell_after_commit(
    session: Session, callbacks: Sequence[AttemptCallback], ended: AttemptEnded
) -> None:
    """Call the callbacks after the COMMIT; not if a transaction or savepoint around is undone."""
    enclosing, transaction = [], session.get_nested_transaction() or session.get_transaction()
    while transaction is not None:
        enclosing.append(transaction)
        transaction = transaction.parent
    session.info.setdefault(ENDED, []).append((enclosing, callbacks, ended))
    if not event.contains(session, "after_commit", _committed):
        event.listen(session, "after_commit", _committed)
        event.listen(session, "after_soft_rollback", _rolled_back)


def _committed(session: Session) -> None:
    if session.in_nested_transaction():
        return  # a savepoint was released
    outermost = session.get_transaction()
    for enclosing, callbacks, ended in session.info.pop(ENDED, ()):
        if enclosing[-1] is not outermost:
            continue  # session.close() has undone its transaction, which no event tells
        for callback in callbacks:
            try:
                callback(ended)
            except BaseException:  # the application's code
                logger.exception("job %d: an on_attempt_end callback has failed", ended.job_id)


def _rolled_back(session: Session, previous: Any) -> None:
    waiting = session.info.get(ENDED, ())
    session.info[ENDED] = [each for each in waiting if previous not in each[0]]
