"""Workers that are frozen, and stay it."""

from __future__ import annotations

import time

from chaos.chores import AT_A_GATE, wait
from chaos.history import START
from chaos.plants import Patch, plant
from chaos.scenario import Size, scenario
from chaos.stage import Stage
from pgqueue import maintenance

CLAIMABLE = 5.0
"""Seconds after the grace: 35 are promised in all."""


@plant
def transactions_of_the_dead_stay_open(patch: Patch) -> None:
    """Rescuers leave it to the server to end the transaction of a frozen worker."""
    from pgqueue.repository import Fleet

    patch.set(Fleet, "end_transactions", lambda _self: [])


@scenario(
    promises="P3 P4",
    research="T4",
    full=Size(jobs=20, seconds=maintenance.SLOW_GRACE.total_seconds()),
    short=Size(jobs=4, seconds=1.5),
    planted={"transactions_of_the_dead_stay_open": "not within .* in transaction mode"},
)
def frozen_for_good(stage: Stage, size: Size) -> None:
    """Frozen with a whole grace before them, in both modes: their jobs start elsewhere in time."""
    fleets, jobs = {}, {}
    for mode in ("lease", "transaction"):
        fleets[mode] = stage.fleet(
            mode,
            1,
            queues=[mode],
            concurrency=size.jobs,
            slow_grace=size.seconds,
            alone_for=AT_A_GATE,
        )
        one = wait.options(queue=mode, max_attempts=1000)
        jobs[mode] = stage.enqueue(one, [("thaw",)] * size.jobs)
        stage.until_started(*jobs[mode])
    frozen = [fleet.members[0] for fleet in fleets.values()]
    for member in frozen:
        member.freeze()
        stage.count("freezes")
    until = time.monotonic() + size.seconds + CLAIMABLE
    for fleet in fleets.values():
        fleet.add()
    for mode, ids in jobs.items():
        stage.until(
            lambda ids=ids: _have_started_again(stage, ids),  # type: ignore[misc]
            seconds=max(until - time.monotonic(), 0.1),
            what=f"the jobs of the frozen worker start again in {mode} mode",
        )
    stage.open("thaw")
    stage.until_ended()
    for member in frozen:
        member.thaw()
    for fleet in fleets.values():
        fleet.until_registered()
        fleet.stop()
    stage.judge()


def _have_started_again(stage: Stage, jobs: list[int]) -> bool:
    return {event.job for event in stage.history(START) if event.attempt == 2} >= set(jobs)
