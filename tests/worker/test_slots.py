"""What a worker knows of its slots after one was replaced, and how it interrupts their attempts."""

import time
import uuid
from datetime import timedelta
from threading import Event

from sqlalchemy import Engine
from worker_rig import runtime_of

from pgqueue import PgQueue
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.outcomes import Outcome
from pgqueue.repository.claim import Claimed
from pgqueue.worker.ledger import Ledger
from pgqueue.worker.slots import Slots


class SlowLedger(Ledger):
    """Holds up the thread of a slot whose attempt has ended, as a busy machine does."""

    def __init__(self) -> None:
        super().__init__()
        self.has_ended, self.is_interrupted = Event(), Event()
        self.was_late: bool | None = None
        """Whether the interrupt was over before the outcome was passed on."""

    def ran(self, run: RunningAttempt, outcome: Outcome | None) -> None:
        self.has_ended.set()
        self.was_late = self.is_interrupted.wait(0.2)
        super().ran(run, outcome)


def test_the_work_of_a_slot_that_was_replaced_still_counts(engine: Engine) -> None:
    """Prefetch learns from what has been done since it last looked."""
    queue = PgQueue(engine)
    task = queue.task(name="t", timeout=timedelta(seconds=1))(lambda: None)
    runtime = runtime_of(queue)
    slots = Slots(runtime, 2)
    stuck = slots.threads[0]
    stuck.ran, stuck.busy = 7, 3.5
    job = Claimed(5, "2026-01-01 00:00:00+00", 1, 1, "default", "t", "{}", 1, 1, 0)
    stuck.current = RunningAttempt(job, task, worker_id=uuid.uuid4(), stopping=Event())
    stuck.current.started_at = time.monotonic() - 60

    slots.watch()
    runtime.buffer.close()

    assert slots.threads[0] is not stuck
    assert slots.work_done() == (7, 3.5)


def test_an_interrupt_waits_for_the_outcome_of_an_attempt_that_ends_at_this_moment(
    engine: Engine,
) -> None:
    """The settler ends after it: a later outcome would be lost, and rescued as a crash."""
    queue = PgQueue(engine)
    queue.task(name="t")(lambda: None)
    runtime = runtime_of(queue)
    ledger = runtime.ledger = SlowLedger()
    slots = Slots(runtime, 1)
    job = Claimed(5, "2026-01-01 00:00:00+00", 1, 1, "default", "t", "{}", 1, 1, 0)
    ledger.claimed([job])
    runtime.identity.acknowledged(sent_at=time.monotonic())

    runtime.buffer.put([job])
    slots.start()
    assert ledger.has_ended.wait(20)
    assert not slots.interrupt()
    ledger.is_interrupted.set()
    runtime.buffer.close()
    slots.join()

    assert ledger.was_late is False
