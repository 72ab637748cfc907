"""What a worker knows of its slots after one of them was replaced."""

import time
import uuid
from datetime import timedelta
from threading import Event

from sqlalchemy import Engine
from worker_rig import runtime_of

from pgqueue import PgQueue
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.repository.claim import Claimed
from pgqueue.worker.slots import Slots


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
