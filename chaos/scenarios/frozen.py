"""Workers that are frozen, and stay it."""

from __future__ import annotations

import time

from chaos.environment import Environment
from chaos.history import START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import AT_A_GATE, wait
from chaos.scenario import Size, scenario
from pgqueue.worker import liveness

CLAIMABLE = 5.0
"""Seconds after the grace: 35 are promised in all."""


@mutation
def transactions_of_the_dead_stay_open(patch: Patch) -> None:
    """Rescuers leave it to the server to end the transaction of a frozen worker."""
    from pgqueue.repository import Workers

    patch.set(Workers, "end_transactions", lambda _self: [])


@scenario(
    promises="P3 P4",
    research="T4",
    full=Size(jobs=20, seconds=liveness.SLOW_GRACE.total_seconds()),
    short=Size(jobs=4, seconds=1.5),
    mutated={"transactions_of_the_dead_stay_open": "not within .* in transaction mode"},
)
def frozen_for_good(environment: Environment, size: Size) -> None:
    """Frozen with a whole grace before them, in both modes: their jobs start elsewhere in time."""
    fleets, jobs = {}, {}
    for mode in ("lease", "transaction"):
        fleets[mode] = environment.workers(
            mode,
            1,
            queues=[mode],
            concurrency=size.jobs,
            slow_grace=size.seconds,
            alone_for=AT_A_GATE,
        )
        one = wait.options(queue=mode, max_attempts=1000)
        jobs[mode] = environment.enqueue(one, [("thaw",)] * size.jobs)
        environment.until_started(*jobs[mode])
    frozen = [workers.members[0] for workers in fleets.values()]
    for member in frozen:
        environment.freeze(member)
    until = time.monotonic() + size.seconds + CLAIMABLE
    for workers in fleets.values():
        workers.add()
    for mode, ids in jobs.items():
        environment.until(
            lambda ids=ids: _have_started_again(environment, ids),  # type: ignore[misc]
            seconds=max(until - time.monotonic(), 0.1),
            what=f"the jobs of the frozen worker start again in {mode} mode",
        )
    environment.open("thaw")
    environment.until_ended()
    for member in frozen:
        member.thaw()
    for workers in fleets.values():
        workers.until_registered()
        workers.stop()
    environment.check()


def _have_started_again(environment: Environment, jobs: list[int]) -> bool:
    return {event.job for event in environment.history(START) if event.attempt == 2} >= set(jobs)
