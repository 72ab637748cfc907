"""One attempt in transaction mode, inside T: the transaction that holds its message.

T may also hold jobs of the same batch that were settled before.  If the handler fails, only its
own writes are undone; only if it has ended T is all of T rolled back.
"""

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, InvalidRequestError

from pgqueue import execution
from pgqueue.execution import CancelWins
from pgqueue.execution.attempt import AttemptResult
from pgqueue.outcomes import Cancelled, Exhausted, Outcome, is_plain_success
from pgqueue.repository import Attempts, Settled
from pgqueue.statements.transactions import (
    BEFORE_SETTLE,
    BEFORE_SETTLE_IN_BATCH,
    GUARD,
    PLAN_BY_KEY,
    UNDO_HANDLER,
)
from pgqueue.unit_of_work import (
    TransactionEnded,
    begin_now,
    release_savepoints,
    server_error,
    set_now,
    time_limits,
)
from pgqueue.worker.handler_transactions import (
    obstacle,
    run_with_async_session,
    run_with_session,
)
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.runtime import WorkerRuntime

FAILURES = (TransactionEnded, DBAPIError, InvalidRequestError)
"""Raised for example by a deferred constraint, or for a savepoint that no longer exists."""


class TransactionAttempt:
    """One handler, its savepoint and its settle; the COMMIT is the caller's.

    Call :meth:`make_ready`, :meth:`verdict` and :meth:`complete`, in this order.
    """

    def __init__(
        self,
        runtime: WorkerRuntime,
        run: RunningAttempt,
        connection: Connection,
        *,
        others_follow: bool,
    ) -> None:
        self.settled = Settled(run.claimed.job_id, None)
        """What the settle in T has written."""
        self.has_lost_transaction = False
        """Whether its handler has ended T, and so undone the work of the other jobs in T."""
        self._runtime = runtime
        self._run = run
        self._connection = connection
        self._others_follow = others_follow

    def make_ready(self, *, plan_freely: str, own_limits: str) -> None:
        """Set up T after the stamp: if its connection is lost, the handler never starts.

        A handler without time limits must not have those of the handler before it in T.
        """
        limits = time_limits(self._run.task.settings.timeout, self._connection) or own_limits
        if self._run.task.is_transactional:
            self._connection.exec_driver_sql(f"{GUARD}; {plan_freely}; {limits}")
            self._connection.begin_nested()  # the savepoint that its Session joins
        else:
            self._connection.exec_driver_sql(limits)

    def verdict(self) -> AttemptResult:
        """Run the handler."""
        runtime, run, task = self._runtime, self._run, self._run.task
        if run.claimed.attempt > run.claimed.max_attempts:
            return AttemptResult(Exhausted(), keeps_writes=False)
        if task.asks_before_start and (outcome := obstacle(runtime, run)) is not None:
            return AttemptResult(outcome, keeps_writes=False)
        if task.in_process:
            return AttemptResult(
                runtime.children.run(run), keeps_writes=False
            )  # T has none of its writes
        if task.is_transactional and task.is_async:
            return run_with_async_session(runtime, run, self._connection)
        if task.is_transactional:
            return run_with_session(runtime, run, self._connection)
        if task.is_async:
            return runtime.loop.wait_for(
                execution.run_async(
                    task, run.claimed, run.context(), around=runtime.around_async_handlers
                )
            )
        return execution.run(task, run.claimed, run.context(), around=runtime.around_handlers)

    def complete(self, verdict: AttemptResult) -> Outcome:
        """Settle in T; undo the handler's writes only if it failed or its job was cancelled."""
        outcome = verdict.outcome
        if not self._run.task.is_transactional:
            if not verdict.keeps_writes or is_plain_success(outcome):
                return self._settle_finally(outcome)
            set_now(self._connection, GUARD)  # its result may be impossible to store
        if verdict.keeps_writes:
            try:
                self._settle_with_writes(outcome)
                return outcome
            except CancelWins:
                outcome = Cancelled("")
            except FAILURES as error:
                _refuse_to_go_on_without_connection(error)
                task, claimed = self._run.task, self._run.claimed
                outcome = execution.after_error(task, claimed, server_error(error))
        self._undo()
        return self._settle_finally(outcome)

    def _settle_with_writes(self, outcome: Outcome) -> None:
        if self._run.task.is_transactional and not self._connection.in_nested_transaction():
            raise TransactionEnded("by the handler")
        self._settle(outcome)
        release_savepoints(self._connection)

    def _undo(self) -> None:
        """Undo the handler's writes; roll back all of T if the handler has ended T."""
        self._run.forget_session()
        try:
            while (savepoint := self._connection.get_nested_transaction()) is not None:
                savepoint.rollback()
            set_now(self._connection, UNDO_HANDLER)
        except FAILURES as error:
            _refuse_to_go_on_without_connection(error)
            if self._connection.invalidated:
                self._run.close_connection()
            self._connection.rollback()
            begin_now(self._connection, PLAN_BY_KEY)
            self.has_lost_transaction = True

    def _settle_finally(self, outcome: Outcome) -> Outcome:
        """Settle when no write is left to undo; returns Cancelled if a cancel came first."""
        try:
            self._settle(outcome)
        except CancelWins:
            return Cancelled("")
        return outcome

    def _settle(self, outcome: Outcome) -> None:
        if self._run.task.is_transactional:
            before = BEFORE_SETTLE_IN_BATCH if self._others_follow else BEFORE_SETTLE
            self._connection.exec_driver_sql(before)
        attempts = Attempts(self._connection, self._runtime.identity.worker_id)
        claimed = self._run.claimed
        is_kept = self._runtime.is_kept(claimed)
        self.settled = execution.complete(attempts, claimed, outcome, held=True, is_kept=is_kept)


def _refuse_to_go_on_without_connection(error: Exception) -> None:
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        raise error
