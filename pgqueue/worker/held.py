"""Transaction mode: a slot holds its job's message in a transaction that stays open while the
handler runs, so that a crash gives the job back at once.

The attempt is stamped on a side connection before its handler starts, or a job that kills its
worker would be tried for ever.  Everything else happens in T, the transaction that holds the
message, or not at all.  The states, and who may act in them: docs/explanation/life-of-a-job.md.
"""

from sqlalchemy import Connection

from pgqueue import redaction
from pgqueue.changed_sessions import close_if_changed, is_changed, watch_session
from pgqueue.execution import Stale
from pgqueue.outcomes import Outcome, Released, Succeeded
from pgqueue.repository import Attempts, Claim, Locked, Pair, Upcoming
from pgqueue.unit_of_work import (
    HANDLING,
    PLAN_BY_KEY,
    begin_now,
    limits_of,
    plan_freely,
    settings_of,
)
from pgqueue.worker.after_commit import tell_of_commit
from pgqueue.worker.crew import Run
from pgqueue.worker.held_attempt import HeldAttempt
from pgqueue.worker.line import Line
from pgqueue.worker.lookout import Ask
from pgqueue.worker.loops import Loop
from pgqueue.worker.transactional import (
    CommitUnknown,
    commit,
    report_stale,
    was_committed,
)
from pgqueue.worker.turnstile import Turnstile
from pgqueue.worker.workbench import WORDS

logger = redaction.logger(__name__)

Done = tuple[Run, Outcome]


class HeldSlot(Loop):
    """One handler thread of transaction mode, with a connection of its own."""

    def __init__(self, turnstile: Turnstile, *, batch: int) -> None:
        super().__init__(name="slot")
        self.crew = turnstile.crew
        self.current: Run | None = None
        self._turnstile = turnstile
        self._batch = batch
        self._next_batch = batch
        self._generation = 0
        self._plan_freely = self._own_limits = ""
        self._line = Line(
            self.crew.engine,
            HANDLING,
            self.crew.outage,
            name="slot",
            stopping=self.crew.stopping,
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
            self._line.cancel()

    def work(self) -> None:
        while self._turnstile.is_open:
            if not self._turnstile.wait_for_turn():
                self._line.rest()  # another sleeps for all
                continue
            self._has_turn = True
            try:
                went_well = not self._turnstile.is_open or self._line.attempt(self._step)
            except CommitUnknown:
                went_well = None
            finally:
                self._end_turn()
            if not went_well:
                self.crew.frontiers.rewind()  # its messages are back, behind the frontiers
            run, self.current = self.current, None
            if run is not None and run.is_abandoned:
                break  # another thread has taken this slot
        self._line.close()

    def _step(self, connection: Connection) -> bool:
        """Lock a batch, run it, commit it; False when it was rolled back."""
        crew = self.crew
        locked: list[Locked] = []
        while not locked and self._turnstile.is_open:
            locked = self._lock(connection)
        self._end_turn()
        if not locked:
            return True
        done: list[Done] = []
        try:
            for row in locked:
                over = crew.stopping.is_set() or is_changed(connection)
                if over or not self._run_one(connection, row, done):
                    crew.frontiers.rewind()  # what has not started goes back when T ends
                    break
            self._commit(connection, done)
            return True
        except Stale:
            connection.rollback()
            for run, _ in done:
                report_stale(self.crew, run.claimed)
            return False
        finally:
            for run, _ in done:
                run.forget_session()
            for row in locked:
                self.crew.bench.forget(row.message_id)
            if close_if_changed(connection):
                self._line.close()

    def _end_turn(self) -> None:
        """Let the next slot claim: this one has, or its connection is broken."""
        if self._has_turn:
            self._has_turn = False
            self._turnstile.claiming.release()

    def _lock(self, connection: Connection) -> list[Locked]:
        """Begin T with the messages to run; sleeps, without a transaction, if there are none."""
        crew, turnstile = self.crew, self._turnstile
        if turnstile.lookout.sleeps_on(self._ask(connection)):
            turnstile.rest()
            return []
        attempts = Attempts(connection, crew.presence.worker_id)
        limit, self._next_batch = self._next_batch, self._batch
        was_quiet = not crew.bench.in_flight  # asked first: the last suspect may end now
        suspects = crew.suspects.are_welcome()
        self._prepare(connection)
        sweep = self._sweeps()
        claim = self._look(attempts, limit=limit, sweep=sweep, suspects=suspects)
        locked = _one_of_each_job(attempts, claim.rows)
        if len(locked) > 1 and any(row.is_alone for row in locked):
            # Its neighbours would lose what they have done if it took the worker down.
            self._next_batch = 1
            crew.frontiers.rewind()
            connection.rollback()
            return []
        if suspects:
            found = [(row.message_id, row.crashes) for row in locked if row.crashes]
            crew.suspects.admit(found, are_all=claim.taken < limit)
        if not locked:
            connection.commit()
            self._sleep(connection, swept=sweep, was_quiet=was_quiet)
            return []
        for row in locked:
            crew.bench.in_flight[row.message_id] = row.claimed(attempt=0, crashes=row.crashes)
        return locked

    def _look(
        self, attempts: Attempts, *, limit: int, sweep: bool, suspects: bool
    ) -> Claim[Locked]:
        tasks = self.crew.task_names
        return self._turnstile.lookout.look(
            lambda pairs: attempts.lock(pairs, tasks=tasks, limit=limit, suspects=suspects),
            limit=limit,
            sweep=sweep,
        )

    def _prepare(self, connection: Connection) -> None:
        if self._generation != self._line.generation:
            self._generation = self._line.generation
            self._plan_freely = plan_freely(connection)
            self._own_limits = settings_of(connection, limits_of(connection))
            watch_session(connection)
            connection.commit()
        begin_now(connection, PLAN_BY_KEY)

    def _sweeps(self) -> bool:
        """Whether this claim looks behind the frontiers; no worker of this mode is elected to."""
        frontiers, turnstile = self.crew.frontiers, self._turnstile
        if frontiers.is_at_start or frontiers.is_sweep_due(elected=True):
            return True
        return turnstile.lookout.found_none and (turnstile.until_empty or frontiers.is_sweep_cheap)

    def _sleep(self, connection: Connection, *, swept: bool, was_quiet: bool) -> None:
        """Sleep for all slots; they wait at the turnstile meanwhile."""
        crew, turnstile = self.crew, self._turnstile
        if turnstile.until_empty:
            if swept and was_quiet:
                turnstile.finished.set()
            else:
                crew.bench.room.wait(0.05)
                crew.bench.room.clear()
            return

        turnstile.rest()
        turnstile.lookout.sleep(self._ask(connection))

    def _ask(self, connection: Connection) -> Ask:
        attempts = Attempts(connection, self.crew.presence.worker_id)

        def ask(pairs: list[Pair]) -> Upcoming:
            upcoming = attempts.upcoming(pairs, tasks=self.crew.task_names)
            connection.commit()  # never sleep in a transaction: it holds back the vacuum
            return upcoming

        return ask

    def _run_one(self, connection: Connection, row: Locked, done: list[Done]) -> bool:
        """Stamp, run and settle one job of the batch inside T; False when the batch ends here.

        It may not start, because another was first, or the job has ended, or the stamp has
        waited for too long; or its handler has ended T.
        """
        claimed = self._turnstile.stamp(row, connection)
        if claimed is None:
            return False
        run = self.crew.run_of(claimed)
        run.begin_on(connection)
        done.append((run, Released()))
        attempt = HeldAttempt(self.crew, run, connection, others_follow=self._batch > 1)
        attempt.make_ready(plan_freely=self._plan_freely, own_limits=self._own_limits)
        self.current = run
        verdict = attempt.verdict()
        if not run.finish():
            with run.leaving:
                raise Stale  # T is ended from outside, and not before the lease is locked
        self.current = None
        done[-1] = (run, attempt.complete(verdict))
        if attempt.has_lost_transaction:
            for neighbour in (each.claimed for each, _ in done[:-1]):
                logger.warning("job %s: its transaction was ended by another", neighbour.job_id)
                self.crew.bench.settled_already(neighbour, "unknown")
            for run, _ in done[:-1]:
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
            self._line.close()  # used again, it would be opened without the settings of a line
            if not was_committed(self.crew, done[-1][0]):
                raise
        for run, outcome in done:
            self.crew.bench.settled_already(run.claimed, WORDS[type(outcome)])
            tell_of_commit(self.crew, run)
        if any(not isinstance(outcome, Succeeded) for _, outcome in done):
            self.crew.listener.poke()  # a retry may be due before the end of somebody's sleep


def _one_of_each_job(attempts: Attempts, rows: list[Locked]) -> list[Locked]:
    """Drops second messages of a job, here or of another's lease: they are damage.

    The stamp of a twin would wait for T, and T for the stamp.
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
