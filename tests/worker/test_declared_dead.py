"""A worker that others have declared dead starts none of the jobs that it had claimed."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine
from worker_rig import runtime_of

from pgqueue import PgQueue
from pgqueue.database.autocommit import autocommitting
from pgqueue.options import OptionsOfWorker
from pgqueue.repository.claim import Claimed
from pgqueue.repository.workers import Workers
from pgqueue.worker.claimer import Claimer
from pgqueue.worker.duties.admit import Admitter
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.slot import Slot
from pgqueue.worker.slots import Slots


@pytest.fixture
def calls() -> list[str]:
    """A line for each call of the handler."""
    return []


@pytest.fixture
def runtime(engine: Engine, calls: list[str]) -> WorkerRuntime:
    queue = PgQueue(engine)
    queue.task(name="t")(lambda: calls.append("called")).delay()
    runtime = runtime_of(queue)
    with autocommitting(engine) as connection:
        Workers(connection).register(
            runtime.identity.worker_id, hostname="here", pid=1, queues=["default"], slots=1
        )
    runtime.identity.acknowledged(sent_at=float("inf"))
    return runtime


def claimer_of(runtime: WorkerRuntime) -> Claimer:
    config = OptionsOfWorker(
        concurrency=1, poll_interval=timedelta(seconds=1), grace=timedelta(seconds=1)
    )
    queue = PgQueue(runtime.engine)
    admitter = Admitter(runtime, queue, most_ready=1, poll_interval=timedelta(seconds=1))
    slots = Slots(runtime, 1)
    return Claimer(runtime, config, slots, admitter, listens=False, until_empty=True)


def die(runtime: WorkerRuntime) -> None:
    """What a heartbeat does that finds this worker declared dead, up to the attempts."""
    runtime.identity.be_reborn()
    runtime.buffer.drain()
    runtime.ledger.forget_all()


def test_a_claim_that_ends_after_the_death_brings_no_job(
    engine: Engine, runtime: WorkerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimer, record = claimer_of(runtime), runtime.ledger.claimed
    claimed: list[Claimed] = []

    def claimed_after_death(jobs: list[Claimed]) -> None:
        die(runtime)
        claimed.extend(jobs)
        record(jobs)

    monkeypatch.setattr(runtime.ledger, "claimed", claimed_after_death)
    slot = Slot(runtime)
    slot.start()
    try:
        while not claimed:
            claimer.reconnecting.run(claimer.step)
    finally:
        runtime.buffer.close()
        slot.join(60)
        claimer.reconnecting.close()
        claimer.close()

    assert runtime.ledger.in_flight == {}
    assert runtime.buffer.heap == []


def test_a_job_that_a_slot_takes_while_the_worker_dies_is_not_started(
    runtime: WorkerRuntime, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Claimed(5, "2026-01-01 00:00:00+00", 1, 1, "default", "t", "{}", 1, 1, 0)
    runtime.ledger.claimed([job])
    slot, begin = Slot(runtime), runtime.attempt_of

    def begin_at_death(claimed: Claimed):  # type: ignore[no-untyped-def]
        die(runtime)
        assert slot.current is None, "it could not be given up"
        return begin(claimed)

    monkeypatch.setattr(runtime, "attempt_of", begin_at_death)
    runtime.buffer.put([job])
    slot.start()
    while runtime.buffer.heap:
        slot.join(0.01)
    runtime.buffer.close()
    slot.join(60)

    assert not slot.is_alive()
    assert calls == []
