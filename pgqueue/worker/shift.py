"""A shift: one run of a worker, from the first heartbeat to the last settle."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread

from sqlalchemy import Connection, Engine

from pgqueue import execution, redaction, schema
from pgqueue.changed_sessions import watched
from pgqueue.errors import TooManyStuck, WorkerBroken
from pgqueue.guests import check_binds, joining_sessions
from pgqueue.job_queue import PgQueue
from pgqueue.notifications import Listener
from pgqueue.outcomes import Outcome, Released
from pgqueue.unit_of_work import OWN, READ_COMMITTED, isolation_of, worker_engine
from pgqueue.worker import outside
from pgqueue.worker.children import Children
from pgqueue.worker.claimer import Claimer
from pgqueue.worker.crew import Crew, Run
from pgqueue.worker.event_loop import EventLoop
from pgqueue.worker.frontiers import Frontiers
from pgqueue.worker.heartbeat import Heartbeat, Presence
from pgqueue.worker.held import HeldSlot
from pgqueue.worker.line import Line
from pgqueue.worker.loops import wait_until
from pgqueue.worker.outage import Outage
from pgqueue.worker.plan import Mode, Plan
from pgqueue.worker.settler import Settler
from pgqueue.worker.slots import Slot
from pgqueue.worker.turnstile import Turnstile
from pgqueue.worker.upkeep import Upkeep
from pgqueue.worker.workbench import Workbench

logger = redaction.logger(__name__)

WATCH_EVERY = 0.1
WATCH_AT_REST_EVERY = 0.25
"""Seconds between two looks at handlers, at the other threads and for a signal; the longer while no
handler runs."""
END_AGAIN = 1.0
"""Seconds between two tries to end a transaction from outside of its thread."""
LAST_CLAIM = 0.5
"""Seconds for a claim to end before it is cancelled."""
LAST_SETTLE = 4.0
"""Seconds from the end of the grace on, for all that is still to be written and for all threads,
when tables are locked or the database does not answer.  What is cancelled then needs some more."""
LAST_TAKEOVER = 2.5
"""Of these, for attempts that are settled over the head of their threads; and before, for slots
whose child processes were killed."""


class Shift:
    """The threads of one run and their end.  :meth:`work` runs in the caller's thread."""

    def __init__(self, queue: PgQueue, plan: Plan, *, stopping: Event, until_empty: bool) -> None:
        self._plan = plan
        self._stopping = stopping
        self._until_empty = until_empty
        self._stuck: list[Slot | HeldSlot] = []
        self._not_ended: list[tuple[Run, Outcome]] = []
        """Attempts whose transactions could not be ended from outside of their threads."""
        self._ended_over_at = float("-inf")
        self._closing = Lock()
        self._is_closed = False
        self._has_interrupted = False
        self._application_engine = queue.engine
        self._engine = worker_engine(queue.engine)
        self._crew = _crew_of(queue, plan, self._engine, stopping)
        presence = self._crew.presence
        outage = self._crew.outage
        self._upkeep = Upkeep(
            self._engine, presence, outage, running=self._running, on_cancel=self._cancel
        )
        bury, give_up = self._upkeep.bury, self._give_up_all
        self._heartbeat = Heartbeat(self._engine, presence, outage, on_dead=bury, on_death=give_up)
        self._settler = Settler(
            self._engine, self._crew.bench, presence, outage, goes_on=self._goes_on
        )
        poll = plan.poll_interval.total_seconds()
        self._turnstile = Turnstile(self._crew, poll_interval=poll, until_empty=until_empty)
        self._claimer = Claimer(
            self._crew, poll_interval=poll, until_empty=until_empty, pace=self._pace
        )
        self._slots = [self._new_slot() for _ in range(plan.slots)]

    def work(self, is_over: Callable[[], bool], grace: Callable[[], float]) -> Counter[str]:
        """Run until it is over, or until nothing is left when that was asked for."""
        try:
            self._verify(is_over)
        except BaseException:
            self._crew.listener.close()
            if self._engine is not self._application_engine:
                self._engine.dispose()
            self._is_closed = True  # no thread was started
            raise
        for thread in (self._heartbeat, self._upkeep, self._settler):
            thread.start()
        try:
            self._supervise(is_over)
        finally:
            self._end(grace)
        return self._crew.bench.counts

    def _supervise(self, is_over: Callable[[], bool]) -> None:
        for known in (self._heartbeat.registered, self._upkeep.informed):
            while not known.wait(WATCH_EVERY):
                self._check_loops()
                if is_over():
                    return
        self._start_slots()
        while not is_over() and not self._finished.wait(self._watch_every):
            outside.tell_of_cuts(self._runs())
            self._replace_overdue()
            self._end_again()
            self._check_loops()

    @property
    def _watch_every(self) -> float:
        return WATCH_EVERY if self._running() else WATCH_AT_REST_EVERY

    @property
    def _finished(self) -> Event:
        return self._claimer.finished if self._leases else self._turnstile.finished

    @property
    def _leases(self) -> bool:
        return self._plan.mode is Mode.LEASE

    def _verify(self, is_over: Callable[[], bool]) -> None:
        """Wait for the database, and refuse tables this code was not written for."""
        line = Line(self._engine, OWN, self._crew.outage, name="start", stopping=self._stopping)

        def verify(connection: Connection) -> bool:
            schema.verify(connection)
            self._take_isolation()
            return True

        try:
            while not is_over() and not line.attempt(verify):
                pass
        finally:
            line.close()

    def _take_isolation(self) -> None:
        """Have handlers run at the level of the application's engine, where they can."""
        if not any(task.is_transactional for task in self._crew.tasks.values()):
            return
        level = isolation_of(self._application_engine)
        if self._leases:
            self._crew.isolation_level = level
        elif level != READ_COMMITTED:
            logger.warning(
                "the engine's transactions are %s, but in transaction mode handlers run in %s: "
                "their transaction also claims and settles, which could then not see what others "
                "have done; use lease mode for handlers that need %s",
                *(level, READ_COMMITTED, level),
            )

    def _start_slots(self) -> None:
        plan = self._plan
        logger.info("serving %s in %s mode", ", ".join(plan.queues), plan.mode)
        for slot in self._slots:
            slot.start()
        if self._leases:
            self._claimer.start()

    def _new_slot(self) -> Slot | HeldSlot:
        if self._leases:
            return Slot(self._crew)
        return HeldSlot(self._turnstile, batch=self._plan.batch)

    def _runs(self) -> list[Run]:
        return [run for slot in self._slots if (run := slot.current) is not None]

    def _pace(self) -> tuple[int, float]:
        """How many jobs have run, and how long they have kept the slots busy."""
        slots = [slot for slot in self._slots if isinstance(slot, Slot)]
        return sum(slot.ran for slot in slots), sum(slot.busy for slot in slots)

    def _running(self) -> list[int]:
        return [run.claimed.job_id for run in self._runs()]

    def _cancel(self, job_ids: set[int]) -> None:
        for run in self._runs():
            if run.claimed.job_id in job_ids:
                run.ask_to_stop()

    def _give_up_all(self) -> None:
        """Declared dead: all its leases belong to others now."""
        self._crew.bench.drain()
        self._crew.bench.in_flight.clear()
        for run in self._runs():
            run.lose()

    def _goes_on(self, behind: bool) -> None:
        """Messages were inserted: the claimer may sleep longer than they wait."""
        if behind:
            self._crew.frontiers.rewind()
        self._crew.listener.poke()

    def _replace_overdue(self) -> None:
        """Settle attempts past their timeout as such, and put other threads into their slots.

        A thread cannot be stopped from outside; its handler sees ``ctx.is_cancelled()``.
        """
        overdue = {
            place: run
            for place, slot in enumerate(self._slots)
            if (run := slot.current) is not None and run.is_overdue
        }
        for run in overdue.values():
            run.is_abandoned = True  # before its thread can learn that the attempt is lost
        with outside.staying(overdue.values()):
            lost = {place: run for place, run in overdue.items() if run.lose()}
            self._settle_over(
                [(run, outside.late(run)) for run in lost.values()], seconds=outside.TAKEOVER
            )
        for place in lost:
            self._stuck.append(self._slots[place])
            self._slots[place] = self._new_slot()
            self._slots[place].start()
        self._stuck = [slot for slot in self._stuck if slot.is_alive()]
        if len(self._stuck) >= self._plan.slots:
            raise TooManyStuck(
                f"{len(self._stuck)} handlers do not return although they are past their timeout; "
                "this process must end to be rid of them"
            )

    def _settle_over(self, outcomes: Sequence[tuple[Run, Outcome]], *, seconds: float) -> None:
        """Settle attempts over the head of their threads, and end their transactions."""
        self._end_over(outcomes, seconds=seconds)
        if self._leases:
            for run, outcome in outcomes:
                self._crew.bench.done(run.claimed, outcome)

    def _end_over(self, outcomes: Sequence[tuple[Run, Outcome]], *, seconds: float) -> None:
        if not outcomes:
            return
        self._ended_over_at = time.monotonic()
        if self._leases:
            left = outside.end_transactions(self._crew, [run for run, _ in outcomes])
            self._not_ended += [each for each in outcomes if each[0] in left]
        else:
            self._not_ended += outside.settle_from_outside(self._crew, outcomes, seconds=seconds)

    def _end_again(self) -> None:
        """Try again what the database has refused: it was away, or had no connection left."""
        if self._not_ended and time.monotonic() - self._ended_over_at >= END_AGAIN:
            outcomes, self._not_ended = self._not_ended, []
            with outside.staying(run for run, _ in outcomes):
                self._end_over(outcomes, seconds=outside.TAKEOVER)

    def _end(self, grace: Callable[[], float]) -> None:
        """Claim nothing more, give back what has not started, let handlers finish, settle."""
        crew = self._crew
        logger.info("stopping: %d handlers still run", len(self._runs()))
        self._stopping.set()
        crew.listener.poke()
        self._end_claims()
        for claimed in crew.bench.drain():
            crew.bench.done(claimed, Released())
        crew.bench.close()
        wait_until(self._have_ended, grace)
        if crew.children.interrupt():
            self._has_interrupted = True
            wait_until(lambda: all(map(_is_stuck, self._slots)), lambda: LAST_TAKEOVER)
        if self._are_alive():
            # Given back only when its thread has ended, or with the process.
            for run in self._runs():
                run.ask_to_stop()
            _outlived.add(self)
            Thread(target=self._close_later, name="pgqueue-last-out", daemon=True).start()
            return
        self.interrupt()  # what threads have left that ended by a mistake, if any has

    def _end_claims(self) -> None:
        """A claim may wait for a lock on a table for as long as somebody holds it."""
        claiming = [slot for slot in self._slots if isinstance(slot, HeldSlot)]
        wait_until(
            lambda: not (self._claimer.is_alive() or any(slot.is_claiming for slot in claiming)),
            lambda: LAST_CLAIM,
        )
        for slot in claiming:
            slot.cancel_claim()
        if self._claimer.is_alive():
            self._claimer.cancel()
            self._claimer.join(LAST_SETTLE)

    def _close_later(self) -> None:
        """Handlers still run, in a process that may go on: their leases need the heartbeat."""
        for slot in self._slots:
            slot.join()
        self._close()
        _outlived.discard(self)

    def _check_loops(self) -> None:
        """A worker that has lost one of its threads must end: half of it looks like all of it."""
        crew = self._crew
        # The event loop before the slots, which end because of it.
        loops = (
            self._heartbeat,
            self._upkeep,
            self._settler,
            self._claimer,
            crew.loop,
            *self._slots,
        )
        for loop in loops:
            if loop.failure is not None:
                self._stopping.set()
                raise WorkerBroken(f"{loop.name} has failed: {loop.failure!r}") from loop.failure

    def _have_ended(self) -> bool:
        outside.tell_of_cuts(self._runs())
        return not self._are_alive()

    def _are_alive(self) -> bool:
        return any(slot.is_alive() for slot in self._slots)

    def interrupt(self) -> bool:
        """Give back what still runs, one attempt the poorer, and close; whether anything did."""
        began = time.monotonic()
        with outside.staying(runs := self._runs()):
            lost = [run for run in runs if run.lose()]
            outcomes = [(run, execution.INTERRUPTED) for run in lost]
            self._settle_over(outcomes, seconds=LAST_TAKEOVER)
        self._has_interrupted = self._has_interrupted or bool(lost)
        self._close(LAST_SETTLE - (time.monotonic() - began))
        return self._has_interrupted

    def _close(self, seconds: float = LAST_SETTLE) -> None:
        with self._closing:
            if not self._is_closed:
                self._close_all(seconds)
                self._is_closed = True

    def _close_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds

        def left() -> float:
            return max(deadline - time.monotonic(), 0.1)

        self._settler.finish(seconds=left())
        self._turnstile.close()
        self._upkeep.stop(seconds=left())
        self._heartbeat.stop(seconds=left())
        self._crew.loop.stop()
        self._crew.children.close()
        self._crew.listener.close()
        if self._engine is not self._application_engine:
            self._engine.dispose()


_outlived: set[Shift] = set()
"""Those whose handlers have outlived the grace."""


def _interrupt_all() -> None:
    for shift in list(_outlived):
        shift.interrupt()


# The process ends.  ``atexit`` would come after Python has waited for the threads of executors, and
# a handler may wait for what it has given to one.  Executors register themselves in the same way.
threading._register_atexit(_interrupt_all)  # type: ignore[attr-defined]
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_outlived.clear)


def _is_stuck(slot: Slot | HeldSlot) -> bool:
    """Whether it does not end because of a handler in its own thread, which nobody can stop."""
    run = slot.current
    return not slot.is_alive() or (run is not None and run.task.address is None)


def _crew_of(queue: PgQueue, plan: Plan, engine: Engine, stopping: Event) -> Crew:
    if any(task.is_transactional for task in queue.tasks.values()):
        check_binds(queue.sessions, queue.engine)
    return Crew(
        engine=watched(engine),
        sessions=joining_sessions(queue.sessions, queue.engine),
        around=queue.around_jobs(),
        tasks=dict(queue.tasks),
        presence=Presence(queues=plan.queues, slots=plan.slots),
        bench=Workbench(),
        outage=Outage(),
        frontiers=Frontiers(plan.queues),
        listener=Listener(engine, enabled=queue.notify),
        loop=EventLoop(engine),
        children=Children.of(queue, slots=plan.slots),
        stopping=stopping,
    )
