"""Jobs that must not wait in a worker, beside a backlog of those that may."""

from __future__ import annotations

from typing import Any

from sqlalchemy import null

from chaos.chores import call
from chaos.history import START
from chaos.logical import crew, declare_dead, rescue, worker_settings
from chaos.plants import Patch, plant
from chaos.scenario import Size, scenario
from chaos.stage import Stage
from pgqueue.repository import Attempts, Pair
from pgqueue.statements.tables import array_of
from pgqueue.worker import frontiers

SLOTS = 4
SOON = 2.0
MARGIN = 3.0
"""Seconds that a busy machine may add."""


@plant
def claims_ahead_say_nothing_of_what_they_leave(patch: Patch) -> None:
    """Jobs that must not wait in a worker are claimed when a slot happens to be free."""
    from pgqueue.statements import claiming

    patch.set(claiming, "_passed_priorities", lambda _due: null())
    patch.rebuild(claiming.claim)


@plant
def what_was_claimed_ahead_goes_first(patch: Patch) -> None:
    """Slots go on with what the worker holds, also while more urgent jobs wait for a slot."""
    from pgqueue.worker.workbench import Workbench

    def put(self: Workbench, jobs: Any, *, priority: int) -> None:
        self.put(jobs)

    patch.set(Workbench, "put_behind", put)


@scenario(
    promises="P6",
    research="T5",
    full=Size(jobs=100_000, workers=1, faults=40),
    short=Size(jobs=10_000, workers=1, faults=5),
    planted={
        "claims_ahead_say_nothing_of_what_they_leave": "urgent jobs have started after another",
        "what_was_claimed_ahead_goes_first": "urgent jobs have started after another",
    },
)
def jobs_that_must_not_wait(stage: Stage, size: Size) -> None:
    """Urgent jobs of one attempt, and rescued ones, beside a backlog: by priority."""
    rescued = stage.enqueue(call, [()] * size.faults)
    _lose_a_worker_with(stage, len(rescued))
    backlog = stage.enqueue(call, [()] * size.jobs)
    urgent = stage.enqueue(call.options(priority=0, max_attempts=1), [()] * (20 * size.faults))
    fleet = stage.fleet("lease", size.workers, concurrency=SLOTS)
    stage.until_ended()
    fleet.stop()
    starts = stage.history(START)
    place = {event.job: number for number, event in enumerate(starts)}
    first_other = min(place[job] for job in backlog)
    last_urgent = max(place[job] for job in urgent)
    last_rescued = max(place[job] for job in rescued)
    overtaken = sum(place[job] > first_other for job in urgent)
    # Each other slot may still begin one that was claimed before.
    stage.expect(overtaken < SLOTS, f"{overtaken} urgent jobs have started after another")
    before = sum(place[job] < last_rescued for job in backlog)
    stage.expect(
        before < size.jobs // 2, f"{before} others have started before the last rescued job"
    )
    waited = starts[last_rescued].at - starts[last_urgent].at
    stage.expect(waited < SOON + MARGIN, f"a rescued job has waited for {waited:.1f} s")
    stage.judge(succeeded=len(stage.acknowledged))


def _lose_a_worker_with(stage: Stage, count: int) -> None:
    """A worker claims them, starts none of them and dies."""
    pairs = [Pair("default", 5, *frontiers.START)]
    tasks = array_of([call.name])
    with crew(worker_settings(stage.url), 1) as [lost]:
        taken = Attempts(lost.line, lost.id).claim(pairs, tasks=tasks, limit=count).taken
        lost.crash(stage.engine)
        declare_dead(stage.engine, lost)
    stage.count("jobs rescued", len(rescue(stage.engine)))
    stage.expect(taken == stage.counts["jobs rescued"] == count, f"{taken} were claimed to be lost")
