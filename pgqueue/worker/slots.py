"""All slots of a worker, with those whose handlers do not return."""

from collections.abc import Callable, Collection, Sequence

from pgqueue.errors import TooManyStuck
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.outcomes import Cancel, Interrupted, Outcome
from pgqueue.worker import timeouts
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.slot import Slot
from pgqueue.worker.threads import wait_until

OBEY_WITHIN = 3.0
"""Seconds for which the worker waits, before it ends, for handlers past their timeout: those that
look at ``ctx.is_cancelled()`` may all have been overdue at the same moment."""
PASS_ON_WITHIN = 2.0
"""Seconds for which an interrupt waits for threads that pass on an outcome, which takes no time if
the machine is not busy."""


class Slots:
    """The supervisor starts and replaces them; other threads ask what runs in them."""

    def __init__(self, runtime: WorkerRuntime, number: int) -> None:
        self._runtime = runtime
        self._slots = [Slot(runtime) for _ in range(number)]
        self._stuck: list[Slot] = []
        """Slots that were replaced, whose handlers have not returned."""
        self._ran, self._busy = 0, 0.0
        """The work done in slots that were replaced."""
        self._transactions = timeouts.Transactions(runtime)

    @property
    def threads(self) -> Sequence[Slot]:
        """The slots, without those that were replaced."""
        return self._slots

    @property
    def abandoned(self) -> Sequence[Slot]:
        """Those that were replaced, whose handlers have not returned."""
        return [slot for slot in self._stuck if slot.is_alive()]

    def start(self) -> None:
        for slot in self._slots:
            slot.start()

    def join(self) -> None:
        for slot in self._slots:
            slot.join()

    def are_alive(self) -> bool:
        return any(slot.is_alive() for slot in self._slots)

    def have_ended(self, can_be_stopped: Callable[[RunningAttempt], bool]) -> bool:
        """Whether each slot has ended, but for those whose handler cannot be stopped."""
        return all(
            not slot.is_alive() or ((run := slot.current) is not None and not can_be_stopped(run))
            for slot in self._slots
        )

    def attempts(self) -> list[RunningAttempt]:
        """The attempts that run now."""
        return [run for slot in self._slots if (run := slot.current) is not None]

    def job_ids(self) -> list[int]:
        """The jobs whose attempts run now."""
        return [run.claimed.job_id for run in self.attempts()]

    def work_done(self) -> tuple[int, float]:
        """How many jobs have run so far, and for how many seconds."""
        ran = sum(slot.ran for slot in self._slots)
        busy = sum(slot.busy for slot in self._slots)
        return self._ran + ran, self._busy + busy

    def cancel(self, asked: Collection[int], killed: Collection[int]) -> None:
        """Ask the handlers of some jobs to stop, and kill those that run in a child process.

        ``asked``, ``killed``: the ids of the jobs.
        """
        if not asked and not killed:
            return
        for run in self.attempts():
            if run.claimed.job_id in asked:
                run.ask_to_stop(Cancel())
            if run.claimed.job_id in killed:
                run.kill()

    def give_up(self) -> None:
        """Give up all attempts: this worker was declared dead, and others rescue its jobs."""
        for run in self.attempts():
            run.lose()

    def interrupt(self) -> bool:
        """Settle all attempts as interrupted; returns whether there were any.

        The settler may end after this: the outcomes of attempts that end at this moment are passed
        on before.
        """
        with timeouts.staying(runs := self.attempts()):
            lost = [run for run in runs if run.lose()]
            self._settle([(run, Interrupted(run.task.settings.max_interruptions)) for run in lost])
        ending = [run for run in runs if not run.is_lost]
        wait_until(
            lambda: not any(run in self.attempts() for run in ending), lambda: PASS_ON_WITHIN
        )
        return bool(lost)

    def watch(self) -> None:
        """Tell handlers whose connection has ended to stop, and replace the slots of handlers that
        are past their timeout.

        A thread cannot be stopped from outside; its handler sees ``ctx.is_cancelled()``.  Raises
        TooManyStuck if as many handlers hang as the worker has slots.
        """
        timeouts.stop_cut_off(self.attempts())
        self._replace_overdue()
        self._transactions.end_again()

    def _replace_overdue(self) -> None:
        """Settle attempts that are past their timeout, and put new threads into their slots."""
        overdue = {
            index: run
            for index, slot in enumerate(self._slots)
            if (run := slot.current) is not None and run.is_overdue
        }
        for run in overdue.values():
            run.is_abandoned = True  # before its thread can see that the attempt is lost
        with timeouts.staying(overdue.values()):
            lost = {index: run for index, run in overdue.items() if run.lose()}
            self._settle([(run, timeouts.late(run)) for run in lost.values()])
        for index in lost:
            stuck, self._slots[index] = self._slots[index], Slot(self._runtime)
            self._stuck.append(stuck)
            # After it was replaced: for a moment too little is counted, and never too much, which
            # prefetch would take for the work of later jobs.
            self._ran, self._busy = self._ran + stuck.ran, self._busy + stuck.busy
            self._slots[index].start()
        if self._are_too_many_stuck():
            wait_until(lambda: not self._are_too_many_stuck(), lambda: OBEY_WITHIN)
        if self._are_too_many_stuck():
            raise TooManyStuck(
                f"{len(self._stuck)} handlers do not return although they are past their timeout; "
                "end this process: their threads cannot be stopped otherwise"
            )

    def _are_too_many_stuck(self) -> bool:
        self._stuck = [slot for slot in self._stuck if slot.is_alive()]
        return len(self._stuck) >= len(self._slots)

    def _settle(self, ended: Sequence[tuple[RunningAttempt, Outcome]]) -> None:
        """Settle attempts whose threads still run, and end their transactions from this thread."""
        self._transactions.end([run for run, _ in ended])
        for run, outcome in ended:
            self._runtime.ledger.ran(run, outcome)
