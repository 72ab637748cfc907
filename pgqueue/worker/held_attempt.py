"""One attempt of transaction mode, inside T, the transaction that holds its message.

T may hold other jobs of a batch, settled before it.  What this handler wrote goes by itself if
it fails; only if the handler has ended T must all of T go.
"""

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from pgqueue import execution
from pgqueue.execution import CancelWins, Verdict
from pgqueue.outcomes import Cancelled, Exhausted, Outcome, Succeeded
from pgqueue.repository import Attempts
from pgqueue.unit_of_work import (
    BEFORE_SETTLE,
    BEFORE_SETTLE_IN_BATCH,
    GUARD,
    PLAN_BY_KEY,
    RELEASE_GUARD,
    UNDO_HANDLER,
    TransactionEnded,
    begin_now,
    set_now,
)
from pgqueue.worker.crew import Crew, Run
from pgqueue.worker.transactional import idle_limit, run_with_async_session, run_with_session


class HeldAttempt:
    """Used in this order: made ready, run, completed.  The COMMIT is the caller's."""

    def __init__(
        self, crew: Crew, run: Run, connection: Connection, *, others_follow: bool
    ) -> None:
        self.is_alone = False
        """Whether its handler has ended T, and with it what the neighbours had done there."""
        self._crew = crew
        self._run = run
        self._connection = connection
        self._others_follow = others_follow

    def make_ready(self, plan_freely: str) -> None:
        """The first round trip on T after the stamp: if T is dead, the handler never starts."""
        limit = idle_limit(self._run)
        if self._run.task.is_transactional:
            self._connection.exec_driver_sql(f"{GUARD}; {plan_freely}; {limit}")
            self._connection.begin_nested()  # for its Session to live in
        else:
            self._connection.exec_driver_sql(limit)

    def verdict(self) -> Verdict:
        """Run the handler."""
        crew, run, task = self._crew, self._run, self._run.task
        if run.claimed.attempt > run.claimed.max_attempts:
            return Verdict(Exhausted(), keeps_writes=False)
        if task.address is not None:
            return Verdict(crew.children.run(run), keeps_writes=False)  # T has none of its writes
        if task.is_transactional and task.is_async:
            return run_with_async_session(crew, run, self._connection)
        if task.is_transactional:
            return run_with_session(crew, run, self._connection)
        if task.is_async:
            return crew.loop.run(
                execution.run_async(task, run.claimed, run.context(), around=crew.around)
            )
        return execution.run(task, run.claimed, run.context(), around=crew.around)

    def complete(self, verdict: Verdict) -> Outcome:
        """Settle in T; what the handler wrote goes only if it failed, or its job was cancelled."""
        outcome = verdict.outcome
        if not self._run.task.is_transactional:
            if isinstance(outcome, Succeeded) and outcome.is_plain:
                return self._settle_finally(outcome)
            set_now(self._connection, GUARD)  # it may be impossible to store
        if verdict.keeps_writes:
            try:
                self._settle_with_writes(outcome)
                return outcome
            except CancelWins:
                outcome = Cancelled("")
            except (TransactionEnded, DBAPIError) as error:  # the latter by a deferred constraint
                if isinstance(error, DBAPIError) and error.connection_invalidated:
                    raise
                outcome = execution.after_error(self._run.task, self._run.claimed, error)
        self._undo()
        return self._settle_finally(outcome)

    def _settle_with_writes(self, outcome: Outcome) -> None:
        if self._run.task.is_transactional and not self._connection.in_nested_transaction():
            raise TransactionEnded("by the handler")
        self._settle(outcome)
        set_now(self._connection, RELEASE_GUARD)

    def _undo(self) -> None:
        """Undo what the handler wrote; with all of T, if it has ended the T it was given."""
        try:
            set_now(self._connection, UNDO_HANDLER)
        except (TransactionEnded, DBAPIError) as error:
            if isinstance(error, DBAPIError) and error.connection_invalidated:
                raise
            self._connection.rollback()
            begin_now(self._connection, PLAN_BY_KEY)
            self.is_alone = True

    def _settle_finally(self, outcome: Outcome) -> Outcome:
        """Nothing of the handler is left to undo: if a cancel has won, it is written as such."""
        try:
            self._settle(outcome)
        except CancelWins:
            return Cancelled("")
        return outcome

    def _settle(self, outcome: Outcome) -> None:
        if self._run.task.is_transactional:
            before = BEFORE_SETTLE_IN_BATCH if self._others_follow else BEFORE_SETTLE
            self._connection.exec_driver_sql(before)
        attempts = Attempts(self._connection, self._crew.presence.worker_id)
        execution.complete(attempts, self._run.claimed, outcome, held=True)
