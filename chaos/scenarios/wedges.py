"""A part of a worker stands still, and the worker as a whole must not be taken for dead."""

from __future__ import annotations

import time

from sqlalchemy import text

from chaos.chores import AT_ONCE, LOOK_EVERY, call, call_async, is_open, note, pay, queue
from chaos.history import END, START
from chaos.plants import Patch, plant
from chaos.scenario import Size, scenario
from chaos.stage import Stage
from pgqueue import JobContext

MODES = ("lease", "transaction")


@queue.task(retry=AT_ONCE)
async def block_the_loop(ctx: JobContext, gate: str) -> int:
    """Waits without giving the event loop back, as a call of a blocking library does."""
    note(START, ctx)
    while not is_open(gate):
        time.sleep(LOOK_EVERY)  # the fault
    note(END, ctx)
    return ctx.attempt


@plant
def heart_beats_by_the_claims(patch: Patch) -> None:
    """A heartbeat asks the table of messages first, as a claim does."""
    from pgqueue.repository import Fleet

    def beat(self, worker_id):  # type: ignore[no-untyped-def]
        self._executor.execute(text("SELECT id FROM pgqueue.message_queue LIMIT 1"))
        return alone(self, worker_id)

    alone = patch.set(Fleet, "beat", beat)


@plant
def heart_beats_on_the_event_loop(patch: Patch) -> None:
    """A heartbeat goes by the event loop that runs the async handlers."""
    from pgqueue.worker import shift
    from pgqueue.worker.event_loop import EventLoop
    from pgqueue.worker.heartbeat import Heartbeat

    loops: list[EventLoop] = []

    def event_loop(engine):  # type: ignore[no-untyped-def]
        loops[:] = [apart(engine)]
        return loops[0]

    def beat(self, connection):  # type: ignore[no-untyped-def]
        async def beat_there() -> None:
            by_thread(self, connection)

        loops[0].wait_for(beat_there())

    apart = patch.set(shift, "EventLoop", event_loop)
    by_thread = patch.set(Heartbeat, "_beat", beat)


@scenario(
    promises="P1 P4",
    research="T16",
    full=Size(jobs=2000, workers=3, seconds=5),
    long=Size(jobs=2000, workers=3, seconds=60),
    short=Size(jobs=100, workers=1, seconds=2),
    planted={"heart_beats_by_the_claims": "were declared dead, and all were well"},
)
def claims_wedged(stage: Stage, size: Size) -> None:
    """Nobody can claim for longer than the grace: nobody is taken for dead, and all goes on."""
    fleets = [stage.fleet(mode, size.workers, slow_grace=size.seconds) for mode in MODES]
    for fleet in fleets:
        fleet.until_registered()
    with stage.engine.connect() as connection:
        connection.execute(text("LOCK TABLE pgqueue.message_queue IN ACCESS EXCLUSIVE MODE"))
        stage.count("wedges")
        _let_pass(stage, size.seconds + 1.5)
        connection.rollback()
    _nobody_is_dead(stage)
    for task in (call, call_async, pay):
        stage.enqueue(task, [(1,)] * (size.jobs // 3))
    stage.until_ended()
    for fleet in fleets:
        fleet.stop()
    stage.judge()


@scenario(
    promises="P1 P3 P4",
    research="T17",
    full=Size(workers=2, faults=4, seconds=3),
    long=Size(workers=2, faults=10, seconds=10),
    short=Size(workers=1, faults=1, seconds=2),
    planted={"heart_beats_on_the_event_loop": "were declared dead, and all were well"},
)
def event_loop_blocked(stage: Stage, size: Size) -> None:
    """A handler blocks the event loop for long: its worker is not taken for dead.

    Which of the workers, of either mode, is left to chance.
    """
    fleets = [stage.fleet(mode, size.workers, slow_grace=size.seconds) for mode in MODES]
    for fleet in fleets:
        fleet.until_registered()
    for number in range(size.faults):
        stage.until_started(*stage.enqueue(block_the_loop, [(f"round{number}",)]))
        stage.count("wedges")
        _let_pass(stage, size.seconds + 1.5)
        _nobody_is_dead(stage)
        _are_done(stage, stage.enqueue(call, [(1,)] * 10))
        stage.open(f"round{number}")
        stage.until_ended()
    for fleet in fleets:
        fleet.stop()
    stage.judge()


def _are_done(stage: Stage, jobs: list[int]) -> None:
    def done() -> bool:
        return {event.job for event in stage.history(END)} >= set(jobs)

    stage.until(done, seconds=5, what="other jobs end")


def _let_pass(stage: Stage, seconds: float) -> None:
    """Time that passes is the fault."""
    over_at = time.monotonic() + seconds
    stage.until(lambda: time.monotonic() > over_at, what=f"{seconds} s pass")


def _nobody_is_dead(stage: Stage) -> None:
    for member in stage.members:
        log = member.log.read_text(errors="replace")
        stage.expect(" is dead: " not in log, "workers were declared dead, and all were well")
