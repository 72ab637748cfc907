"""The slots of transaction mode.

A slot locks the message of its job in a transaction, called T here, that stays open while the
handler runs.  A crash ends T, and so releases the job at once.

The stamp counts crashes; without it, a job that kills its worker would be tried for ever.  Another
connection commits it before the handler starts.  All other writes of the attempt are in T.
The page docs/explanation/life-of-a-job.md has the states of a job in this mode.
"""

from sqlalchemy import Connection

from pgqueue import redaction
from pgqueue.connections.settings import HANDLING
from pgqueue.execution import Stale
from pgqueue.outcomes import Outcome, Released, Succeeded
from pgqueue.repository import Attempts, Claim, ClaimCursor, Locked, Settled, Upcoming
from pgqueue.statements.transactions import PLAN_BY_KEY
from pgqueue.unit_of_work import (
    CommitUnknown,
    begin_now,
    commit,
    end,
    limits_of,
    plan_freely,
    settings_of,
)
from pgqueue.worker.handler_sessions import call_after_commit
from pgqueue.worker.handler_transactions import report_stale
from pgqueue.worker.mode import Slot
from pgqueue.worker.poller import Ask
from pgqueue.worker.reconnecting import ReconnectingConnection
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.transaction_mode.attempt import TransactionAttempt
from pgqueue.worker.transaction_mode.claim_gate import ClaimGate
from pgqueue.worker.unknown_commits import was_committed

logger = redaction.logger(__name__)

Done = tuple[RunningAttempt, Outcome, Settled]


class TransactionSlot(Slot):
    """One handler thread of transaction mode, with a connection of its own."""

    def __init__(self, claim_gate: ClaimGate, *, batch: int) -> None:
        super().__init__()
        self.runtime = claim_gate.runtime
        self._claim_gate = claim_gate
        self._batch = batch
        self._next_batch = batch
        self._generation = 0
        self._plan_freely = self._own_limits = ""
        self._reconnecting = ReconnectingConnection(
            self.runtime.engine,
            HANDLING,
            self.runtime.outage,
            name="slot",
            stopping=self.runtime.stopping,
            isolation_level="READ COMMITTED",
            before_wait=self._end_turn,
        )
        self._has_turn = False

    @property
    def is_claiming(self) -> bool:
        return self._has_turn

    def cancel_claim(self) -> None:
        """Cancel a claim that waits for a lock on a table."""
        if self._has_turn:
            self._reconnecting.cancel()

    def work(self) -> None:
        while self._claim_gate.is_open:
            if not self._claim_gate.wait_for_turn():
                self._reconnecting.rest()  # another slot waits for jobs, for all slots
                continue
            self._has_turn = True
            try:
                went_well = not self._claim_gate.is_open or self._reconnecting.attempt(self._step)
            except CommitUnknown:
                went_well = None
            finally:
                self._end_turn()
            if not went_well:
                self.runtime.cursors.rewind()  # they have passed its messages, which are free now
            run, self.current = self.current, None
            if run is not None and run.is_abandoned:
                break  # another thread has taken this slot
        self._reconnecting.close()

    def _step(self, connection: Connection) -> bool:
        """Lock a batch, run it, commit it; False if it was rolled back."""
        runtime = self.runtime
        locked: list[Locked] = []
        while not locked and self._claim_gate.is_open:
            locked = self._lock(connection)
        self._end_turn()
        if not locked:
            return True
        done: list[Done] = []
        try:
            for row in locked:
                if runtime.stopping.is_set() or not self._run_one(connection, row, done):
                    runtime.cursors.rewind()  # jobs not started are free again when T ends
                    break
            self._commit(connection, done)
            return True
        except Stale:
            connection.rollback()
            for run, *_ in done:
                report_stale(self.runtime, run.claimed)
            return False
        finally:
            for run, *_ in done:
                run.forget_session()
            for row in locked:
                self.runtime.buffer.forget(row.message_id)

    def _end_turn(self) -> None:
        """Let the next slot claim: this one has claimed, or its connection is broken."""
        if self._has_turn:
            self._has_turn = False
            self._claim_gate.claiming.release()

    def _lock(self, connection: Connection) -> list[Locked]:
        """Begin T and lock the messages to run; sleep, without a transaction, if there are none."""
        runtime, claim_gate = self.runtime, self._claim_gate
        if claim_gate.poller.sleeps_on(self._ask(connection)):
            claim_gate.rest()
            return []
        attempts = Attempts(connection, runtime.identity.worker_id)
        limit, self._next_batch = claim_gate.poller.limit(self._next_batch), self._batch
        # Read before the claim: the last suspect may end now, and a settle may make a job due.
        was_idle = not runtime.buffer.in_flight and not runtime.settles_from_outside
        admitted = runtime.admitter.admitted
        suspects = runtime.crash_isolation.are_welcome()
        self._prepare(connection)
        claim_gate.poller.look_at_ages(attempts)
        sweep = self._sweeps()
        claim = self._look(attempts, limit=limit, sweep=sweep, suspects=suspects)
        locked = _one_of_each_job(attempts, claim.rows)
        if len(locked) > 1 and any(row.is_alone for row in locked):
            # If the one that must be alone crashed the worker, the others would lose their work.
            self._next_batch = 1
            runtime.cursors.rewind()
            connection.rollback()
            return []
        if suspects:
            found = [(row.message_id, row.crashes) for row in locked if row.crashes]
            runtime.crash_isolation.admit(found, are_all=claim.taken < limit)
        if not locked:
            end(connection)
            self._sleep(connection, swept=sweep, was_idle=was_idle, admitted=admitted)
            return []
        for row in locked:
            runtime.buffer.in_flight[row.message_id] = row.claimed(attempt=0, crashes=row.crashes)
        return locked

    def _look(
        self, attempts: Attempts, *, limit: int, sweep: bool, suspects: bool
    ) -> Claim[Locked]:
        tasks, meta = self.runtime.open_tasks, self.runtime.reads_meta
        return self._claim_gate.poller.look(
            lambda pairs: attempts.lock(
                pairs, tasks=tasks, limit=limit, suspects=suspects, meta=meta
            ),
            limit=limit,
            sweep=sweep,
        )

    def _prepare(self, connection: Connection) -> None:
        if self._generation != self._reconnecting.generation:
            self._generation = self._reconnecting.generation
            self._plan_freely = plan_freely(connection)
            self._own_limits = settings_of(connection, limits_of(connection))
            end(connection)
        begin_now(connection, PLAN_BY_KEY)

    def _sweeps(self) -> bool:
        """Whether this claim begins at the start of the index; every worker sweeps in this mode."""
        cursors, claim_gate = self.runtime.cursors, self._claim_gate
        if cursors.is_at_start or cursors.is_sweep_due(elected=True):
            return True
        return claim_gate.poller.found_none and (claim_gate.until_empty or cursors.is_sweep_cheap)

    def _sleep(self, connection: Connection, *, swept: bool, was_idle: bool, admitted: int) -> None:
        """Wait for a due job.  The other slots wait at the claim gate meanwhile."""
        runtime, claim_gate = self.runtime, self._claim_gate
        if claim_gate.until_empty:
            if swept and was_idle and runtime.leaves_nothing(admitted):
                claim_gate.finished.set()
            else:
                runtime.buffer.room.wait(0.05)
                runtime.buffer.room.clear()
            return

        claim_gate.rest()
        claim_gate.poller.sleep(self._ask(connection))

    def _ask(self, connection: Connection) -> Ask:
        attempts = Attempts(connection, self.runtime.identity.worker_id)

        def ask(pairs: list[ClaimCursor]) -> Upcoming:
            upcoming = attempts.upcoming(pairs, tasks=self.runtime.open_tasks)
            end(connection)  # never sleep in a transaction: it holds back the vacuum
            return upcoming

        return ask

    def _run_one(self, connection: Connection, row: Locked, done: list[Done]) -> bool:
        """Stamp, run and settle one job of the batch inside T; False if the batch ends here.

        The batch ends if the job may not start (another worker was first, the job has ended, or
        the stamp has waited too long), or if the handler has ended T.
        """
        claimed = self._claim_gate.stamp(row, connection)
        if claimed is None:
            return False
        if self.runtime.events is not None and row.seen_message_id == row.message_id:
            self.runtime.events.crashed(claimed)
        run = self.runtime.run_of(claimed)
        run.begin_on(connection)
        done.append((run, Released(), Settled(claimed.job_id, None)))
        attempt = TransactionAttempt(self.runtime, run, connection, others_follow=self._batch > 1)
        attempt.make_ready(plan_freely=self._plan_freely, own_limits=self._own_limits)
        self.current = run
        verdict = attempt.verdict()
        if not run.finish():
            with run.leaving:
                raise Stale  # another thread has taken over the attempt, and ends T
        self.current = None
        outcome = attempt.complete(verdict)
        done[-1] = (run, outcome, attempt.settled)
        if attempt.has_lost_transaction:
            for neighbour in (each.claimed for each, *_ in done[:-1]):
                logger.warning(
                    "job %s: the handler of another job ended its transaction", neighbour.job_id
                )
                self.runtime.buffer.discarded(neighbour, "unknown")
            for run, *_ in done[:-1]:
                run.forget_session()
            del done[:-1]
        return not attempt.has_lost_transaction

    def _commit(self, connection: Connection, done: list[Done]) -> None:
        if not done:
            connection.rollback()
            return
        try:
            commit(connection)
        except CommitUnknown:
            self._reconnecting.close()  # the next connection is set up anew
            last, stopping = done[-1][0], self.runtime.stopping
            if not was_committed(
                self.runtime.engine, last.worker_id, last.claimed, stopping=stopping
            ):
                raise
        for run, outcome, settled in done:
            self.runtime.note_times(run)
            self.runtime.buffer.settled([(run.claimed, outcome)], [settled])
            call_after_commit(self.runtime.around, run.context, run.session)
        if any(not isinstance(outcome, Succeeded) for _, outcome, _ in done):
            self.runtime.listener.poke()  # a retry may be due before another slot wakes


def _one_of_each_job(attempts: Attempts, rows: list[Locked]) -> list[Locked]:
    """Drop second messages of a job in this batch or under another's lease: damaged data.

    The stamp of a second message would wait for T, and T for the stamp.
    """
    kept: dict[int, Locked] = {}
    for row in rows:
        may_take_over = row.seen_held and (row.seen_message_id or 0) <= row.message_id
        if row.job_id not in kept and (row.seen_message_id is None or may_take_over):
            kept[row.job_id] = row
            continue
        logger.warning("job %s: dropped a second message", row.job_id)
        attempts.take_message(row.claimed(attempt=0, crashes=0))
    return list(kept.values())
