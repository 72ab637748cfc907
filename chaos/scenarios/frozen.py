"""Workers that are frozen, and stay it."""

from __future__ import annotations

import time

from chaos.environment import Environment
from chaos.history import START
from chaos.sample_tasks import AT_A_GATE, wait
from chaos.scenario import Size, scenario
from pgqueue.worker import liveness

CLAIMABLE = 5.0
"""Seconds after the grace: 35 are promised in all."""


@scenario(
    promises="P3 P4",
    research="T4",
    full=Size(jobs=20, seconds=liveness.SLOW_GRACE.total_seconds()),
    short=Size(jobs=4, seconds=1.5),
    mutated={"rescue_loses_the_message": "not within .* start again|no worker will ever run it"},
)
def frozen_for_good(environment: Environment, size: Size) -> None:
    """Frozen with a whole grace before it: its jobs start elsewhere in time."""
    workers = environment.workers(
        1, concurrency=size.jobs, slow_grace=size.seconds, alone_for=AT_A_GATE
    )
    jobs = environment.enqueue(wait.options(max_attempts=1000), [("thaw",)] * size.jobs)
    environment.until_started(*jobs)
    [frozen] = workers.members
    environment.freeze(frozen)
    until = time.monotonic() + size.seconds + CLAIMABLE
    workers.add()
    environment.until(
        lambda: _have_started_again(environment, jobs),
        seconds=max(until - time.monotonic(), 0.1),
        what="the jobs of the frozen worker start again",
    )
    environment.open("thaw")
    environment.until_ended()
    frozen.thaw()
    workers.until_registered()
    workers.stop()
    environment.check()


def _have_started_again(environment: Environment, jobs: list[int]) -> bool:
    return {event.job for event in environment.history(START) if event.attempt == 2} >= set(jobs)
