"""What a batch costs."""

from __future__ import annotations

from benchmarks.arena import Arena
from benchmarks.case import Bench, Finding, Size, case
from benchmarks.cases.drains import RATE
from benchmarks.systems import PGQUEUE


@case(
    smoke=Size(jobs=200),
    usual=Size(jobs=20_000, turns=3),
    full=Size(jobs=50_000, turns=7),
)
def jobs_of_a_batch(bench: Bench, size: Size) -> Finding:
    """No-op jobs in one batch, enqueued by one ``enqueue_many`` and drained, beside as many in
    none."""
    finding = Finding()
    batch = PGQUEUE.given("in a batch", batch=True)
    enqueued: dict[str, list[float]] = {}
    drained: dict[str, list[float]] = {}
    with bench.arenas(batch, PGQUEUE) as arenas:
        for _ in range(size.turns):
            for arena in arenas:
                enqueued.setdefault(arena.label, []).append(_enqueue_rate(arena, size.jobs))
                drained.setdefault(arena.label, []).append(arena.drain(size.jobs))
    for what, found in (("enqueue", enqueued), ("drain", drained)):
        series = {name: finding.add(f"{what}: {name}", found[name], RATE) for name in found}
        finding.ratio(series[batch.label], series[PGQUEUE.label])
    return finding


def _enqueue_rate(arena: Arena, jobs: int) -> float:
    return jobs / arena.fill(jobs)
