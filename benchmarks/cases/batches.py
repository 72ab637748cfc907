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
    for what, found, least in (("enqueue", enqueued, None), ("drain", drained, 0.95)):
        series = {name: finding.add(f"{what}: {name}", found[name], RATE) for name in found}
        finding.ratio(series[batch.label], series[PGQUEUE.label], at_least=least)
    return finding


@case(
    smoke=Size(jobs=20),
    usual=Size(jobs=1_000, turns=5),
    full=Size(jobs=1_000, turns=7),
)
def batch_callback(bench: Bench, size: Size) -> Finding:
    """The callback of a batch of 1,000 no-op jobs: from the start of the last job until the
    callback starts."""
    finding = Finding()
    with bench.arena(PGQUEUE.given("", batch=True, callback=size.jobs)) as arena:
        waits = [_wait_of_the_callback(arena, size.jobs) for _ in range(size.turns)]
    finding.bound(finding.add("the callback", waits, "s"), at_most=0.1)
    return finding


def _wait_of_the_callback(arena: Arena, jobs: int) -> float:
    arena.fill(jobs + 1, bulk=jobs)
    with arena.workers() as processes:
        arena.wait_for_starts(jobs + 1, processes)
        arena.wait_until_none_is_left(processes)
    arena.verify(jobs + 1)
    *members, callback = (arena.starts.of(number)[0] for number in range(jobs + 1))
    return callback - max(members)


def _enqueue_rate(arena: Arena, jobs: int) -> float:
    return jobs / arena.fill(jobs)
