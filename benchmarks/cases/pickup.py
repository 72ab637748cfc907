"""How soon a job starts."""

from __future__ import annotations

import time

from benchmarks.arena import Arena
from benchmarks.case import Bench, Finding, Size, case
from benchmarks.systems import GRAPHILE, PGQUEUE, PGQUEUER

WARM_UP = 20
GAP = 0.05
"""Seconds between two jobs: the worker is asleep again by then."""
POLL = 0.5
FALLEN_ASLEEP = 1.0


@case(smoke=Size(jobs=10), usual=Size(jobs=100, turns=3), full=Size(jobs=300, turns=5))
def pickup(bench: Bench, size: Size) -> Finding:
    """The time from the return of the enqueue call to the handler's first line, with an idle
    worker."""
    finding = Finding()
    with bench.arenas(PGQUEUE, GRAPHILE, PGQUEUER.given("", batch=10)) as arenas:
        waits: dict[str, list[list[float]]] = {arena.label: [] for arena in arenas}
        for _ in range(size.turns):
            for arena in arenas:
                waits[arena.label].append(_waits(arena, size.jobs))
    for name, turns in waits.items():
        p50 = finding.add(f"{name}, p50", [quantile(turn, 0.50) for turn in turns], "ms")
        p99 = finding.add(f"{name}, p99", [quantile(turn, 0.99) for turn in turns], "ms")
        if name == PGQUEUE.label:
            finding.bound(p50, at_most=0.8)
            finding.bound(p99, at_most=2.5)
    return finding


@case(smoke=Size(jobs=3), usual=Size(jobs=20, turns=1), full=Size(jobs=100, turns=3))
def pickup_by_polling(bench: Bench, size: Size) -> Finding:
    """The same time without notifications, with a poll every half second."""
    finding = Finding()
    with bench.arena(PGQUEUE.given("polling", notify=False, poll=POLL)) as arena:
        turns = [_waits(arena, size.jobs) for _ in range(size.turns)]
    longest = finding.add("the longest wait", [max(turn) for turn in turns], "ms")
    finding.bound(longest, at_most=1000 * POLL)
    return finding


@case(
    smoke=Size(jobs=5, rows=2_000),
    usual=Size(jobs=200, rows=300_000),
    full=Size(jobs=500, rows=1_000_000),
)
def urgent(bench: Bench, size: Size) -> Finding:
    """The wait of a job of high priority during a drain of many jobs of low priority."""
    finding = Finding()
    with bench.arena(PGQUEUE) as arena:
        arena.fill(size.rows + size.jobs, bulk=size.rows)
        arena.calm()
        with arena.workers() as processes:
            arena.wait_for_starts(min(size.rows, 1000), processes)
            asked = arena.tell("each", first=size.rows, jobs=size.jobs, gap=0.02, priority=0)
            was_busy = arena.tell("left") > 0
            arena.wait_for_starts(size.rows + size.jobs, processes)
        started = [arena.starts.of(size.rows + number)[0] for number in range(size.jobs)]
    waits = [1000 * (a - b) for a, b in zip(started, asked["returned"], strict=True)]
    p99 = finding.add("p99", [quantile(waits, 0.99)], "ms")
    finding.add("p50", [quantile(waits, 0.50)], "ms")
    finding.bound(p99, at_most=20)
    finding.remarks.append(
        f"{len(waits)} urgent jobs beside {size.rows:,} others"
        + ("." if was_busy else ", which were done before the last urgent one came.")
    )
    return finding


def _waits(arena: Arena, jobs: int) -> list[float]:
    """Milliseconds, sorted."""
    arena.fill(WARM_UP + jobs, bulk=0)
    with arena.workers() as processes:
        arena.tell("each", first=0, jobs=WARM_UP, gap=GAP)
        arena.wait_for_starts(WARM_UP, processes)
        time.sleep(FALLEN_ASLEEP)  # an idle worker is what is measured
        asked = arena.tell("each", first=WARM_UP, jobs=jobs, gap=GAP)
        arena.wait_for_starts(WARM_UP + jobs, processes)
    started = [arena.starts.of(WARM_UP + number)[0] for number in range(jobs)]
    return sorted(1000 * (a - b) for a, b in zip(started, asked["returned"], strict=True))


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
