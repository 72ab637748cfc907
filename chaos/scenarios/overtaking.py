"""Jobs that must not wait in a worker, beside a backlog of those that may."""

from __future__ import annotations

from chaos.environment import Environment
from chaos.history import START
from chaos.interleavings.logical_workers import (
    declare_dead,
    logical_workers,
    rescue,
    worker_settings,
)
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import call
from chaos.scenario import Size, scenario
from pgqueue.options import OptionsOfWorker
from pgqueue.repository.claim import ClaimCursor
from pgqueue.repository.settle import Attempts
from pgqueue.repository.tables import array_of
from pgqueue.worker.claiming import cursors

SLOTS = 4
SOON = 2.0
MARGIN = 3.0
"""Seconds that a busy machine may add."""


@mutation
def claims_ahead_go_on_beside_what_they_leave(patch: Patch) -> None:
    """The worker fills its memory with other jobs, and no slot is free for what was left."""
    from pgqueue.worker.claiming.prefetch import Prefetch

    real = Prefetch.room

    def room(self, **counts):  # type: ignore[no-untyped-def]
        self._left = 0
        return real(self, **counts)

    patch.set(Prefetch, "room", room)


@scenario(
    promises="P6",
    full=Size(jobs=100_000, workers=1, faults=40),
    short=Size(jobs=10_000, workers=1, faults=5),
    mutated={"claims_ahead_go_on_beside_what_they_leave": "all jobs end"},
)
def jobs_that_must_not_wait(environment: Environment, size: Size) -> None:
    """Urgent jobs of one attempt, and rescued ones, beside a backlog: soon."""
    rescued = environment.enqueue(call, [()] * size.faults)
    _lose_a_worker_with(environment, len(rescued))
    backlog = environment.enqueue(call, [()] * size.jobs)
    urgent = environment.enqueue(
        call.options(priority=0, max_attempts=1), [()] * (20 * size.faults)
    )
    workers = environment.workers(size.workers, concurrency=SLOTS)
    environment.finish(workers)
    starts = environment.history(START)
    place = {event.job: number for number, event in enumerate(starts)}
    last_urgent = max(place[job] for job in urgent)
    last_rescued = max(place[job] for job in rescued)
    overtook = sum(place[job] < last_urgent for job in backlog)
    # One claim ahead may bring others beside urgent jobs; each other slot may begin one more.
    environment.expect(
        overtook < OptionsOfWorker().ahead + SLOTS,
        f"{overtook} others have started before the last urgent one",
    )
    before = sum(place[job] < last_rescued for job in backlog)
    environment.expect(
        before < size.jobs // 2, f"{before} others have started before the last rescued job"
    )
    waited = starts[last_rescued].at - starts[last_urgent].at
    environment.expect(waited < SOON + MARGIN, f"a rescued job has waited for {waited:.1f} s")
    environment.judge(succeeded=len(environment.acknowledged))


def _lose_a_worker_with(environment: Environment, count: int) -> None:
    """A worker claims them, starts none of them and dies."""
    pairs = [ClaimCursor("default", 5, *cursors.START)]
    tasks = array_of([call.name])
    with logical_workers(worker_settings(environment.url), 1) as [lost]:
        taken = Attempts(lost.line, lost.id).claim(pairs, tasks=tasks, limit=count).taken
        lost.crash(environment.engine)
        declare_dead(environment.engine, lost)
    environment.count("jobs rescued", len(rescue(environment.engine)))
    environment.expect(
        taken == environment.counts["jobs rescued"] == count, f"{taken} were claimed to be lost"
    )
