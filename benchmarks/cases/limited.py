"""How fast jobs under limits are run, and what others feel of a key that is blocked."""

from __future__ import annotations

import time
from operator import methodcaller

from benchmarks.arena import Arena
from benchmarks.case import Bench, Finding, Size, case, in_turns
from benchmarks.cases.drains import RATE
from benchmarks.cases.pickup import quantile
from benchmarks.cases.unkind import snapshot
from benchmarks.systems import PGQUEUE, PGQUEUER

BLOCKED_FOR = 15.0
"""Seconds for which the first job of the blocked key runs: longer than the others take."""


@case(
    smoke=Size(jobs=100),
    usual=Size(jobs=1_000, turns=3),
    full=Size(jobs=10_000, turns=7),
)
def drain_limited(bench: Bench, size: Size) -> Finding:
    """No-op jobs of one key, of which at most so many run at once; PgQueuer beside it with its
    ``concurrency_limit``."""
    finding = Finding()
    ours = [PGQUEUE.given(f"at most {limit}", limit=limit) for limit in (1, 10, 100)]
    theirs = [PGQUEUER.given(f"at most {limit}", limit=limit) for limit in (1, 10, 100)]
    with bench.arenas(*ours, *theirs) as arenas:
        found = in_turns(arenas, size.turns, lambda arena: arena.drain(size.jobs))
    series = {name: finding.add(name, values, RATE) for name, values in found.items()}
    for mine, other in zip(ours, theirs, strict=True):
        if other.label in series:
            finding.ratio(series[mine.label], series[other.label])
    return finding


@case(
    smoke=Size(jobs=500, rows=100),
    usual=Size(jobs=20_000, rows=10_000, turns=3),
    full=Size(jobs=50_000, rows=10_000, turns=7),
)
def drain_of_many_keys(bench: Bench, size: Size) -> Finding:
    """No-op jobs of 10,000 keys, one job of a key at a time, beside as many without a limit."""
    finding = Finding()
    limited = PGQUEUE.given(f"{size.rows:,} keys", limit=1, keys=size.rows)
    with bench.arenas(limited, PGQUEUE) as arenas:
        found = in_turns(arenas, size.turns, lambda arena: arena.drain(size.jobs))
    series = {name: finding.add(name, values, RATE) for name, values in found.items()}
    finding.ratio(series[limited.label], series[PGQUEUE.label])
    return finding


@case(
    smoke=Size(jobs=200, rows=20),
    usual=Size(jobs=20_000, rows=2_000, turns=3),
    full=Size(jobs=50_000, rows=2_000, turns=7),
)
def drain_of_many_queues(bench: Bench, size: Size) -> Finding:
    """No-op jobs of 2,000 queues, served by ``*``, beside as many of two queues; and jobs of a
    millisecond in both."""
    finding = Finding()
    for what, jobs, options in (
        ("no-ops", size.jobs, {}),
        ("jobs of 1 ms", size.jobs // 4, {"seconds": 0.001}),
    ):
        many, two = (
            PGQUEUE.given(f"{what}, {queues:,} queues", queues=queues, **options)
            for queues in (size.rows, 2)
        )
        with bench.arenas(many, two) as arenas:
            found = in_turns(arenas, size.turns, methodcaller("drain", jobs))
        series = {name: finding.add(name, values, RATE) for name, values in found.items()}
        finding.ratio(series[many.label], series[two.label], at_least=0.8)
    return finding


@case(
    smoke=Size(jobs=100, rows=500),
    usual=Size(jobs=2_000, rows=100_000, turns=3),
    full=Size(jobs=2_000, rows=100_000, turns=7),
)
def blocked_key(bench: Bench, size: Size) -> Finding:
    """Jobs of other keys that were enqueued behind 100,000 of a key that is blocked, beside the
    same without these."""
    finding = Finding()
    free: list[float] = []
    behind: list[float] = []
    with bench.arena(PGQUEUE.given("other keys", limit=1, keys=100)) as arena:
        for _ in range(size.turns):
            free.append(_rate_of_others(arena, size.jobs, blocked=0))
            behind.append(_rate_of_others(arena, size.jobs, blocked=size.rows))
    ours = finding.add("behind a blocked key", behind, RATE)
    finding.ratio(ours, finding.add("alone", free, RATE))
    return finding


@case(
    smoke=Size(jobs=5, rows=300),
    usual=Size(jobs=300, rows=100_000),
    full=Size(jobs=500, rows=100_000, turns=3),
)
def fair_turns(bench: Bench, size: Size) -> Finding:
    """Single jobs of one key that come while 100,000 jobs of another wait, each of 10 ms, with
    ``fair_by``: from the return of the enqueue call to the handler's first line."""
    finding = Finding()
    turns = []
    with bench.arena(PGQUEUE.given("fair_by", fair=True, seconds=0.01)) as arena:
        for _ in range(size.turns):
            arena.fill(size.rows + size.jobs, bulk=size.rows)
            arena.calm()
            with arena.workers() as processes:
                arena.wait_for_starts(min(size.rows // 2, 100), processes)
                asked = arena.tell("each", first=size.rows, jobs=size.jobs, gap=0.03, key=1)
                arena.wait_for_starts(size.jobs, processes, first=size.rows)
            started = [arena.starts.of(size.rows + number)[0] for number in range(size.jobs)]
            turns.append([1000 * (a - b) for a, b in zip(started, asked["returned"], strict=True)])
    p95 = finding.add("p95", [quantile(turn, 0.95) for turn in turns], "ms")
    finding.add("p50", [quantile(turn, 0.50) for turn in turns], "ms")
    finding.bound(p95, at_most=100)
    return finding


@case(
    smoke=Size(jobs=100, rows=1_100),
    usual=Size(jobs=2_000, rows=10_000, turns=1),
    full=Size(jobs=20_000, rows=100_000, turns=7),
)
def drain_fair(bench: Bench, size: Size) -> Finding:
    """No-op jobs with ``fair_by``: of one key, of 1,000 keys, and one job of each of many."""
    finding = Finding()
    few = PGQUEUE.given("fair_by, 1 key", fair=True)
    many = PGQUEUE.given("fair_by, 1,000 keys", fair=True, keys=1_000)
    all_wait = PGQUEUE.given(f"fair_by, {size.rows:,} keys", fair=True, keys=size.rows)
    with bench.arenas(few, many) as arenas:
        found = in_turns(arenas, size.turns, lambda arena: arena.drain(size.jobs))
    with bench.arenas(all_wait) as arenas:
        found |= in_turns(arenas, 1, lambda arena: arena.drain(size.rows))
    for name, values in found.items():
        finding.add(name, values, RATE)
    return finding


@case(
    smoke=Size(jobs=100, rows=200),
    usual=Size(jobs=2_000, rows=8_000, turns=3),
    full=Size(jobs=10_000, rows=40_000, turns=5),
)
def held_limits(bench: Bench, size: Size) -> Finding:
    """The last jobs of a backlog under limits that a worker runs while a transaction holds its
    snapshot, compared with the same jobs without the transaction."""
    finding = Finding()
    kinds = (
        PGQUEUE.given("at most 10", limit=10),
        PGQUEUE.given("strict, 50 keys", limit=1, strict=True, keys=50),
        PGQUEUE.given("a rate, 100 keys", limit=100_000, burst=1_000, keys=100),
        PGQUEUE.given("fair_by, 100 keys", fair=True, keys=100),
    )
    for kind in kinds:
        calm: list[float] = []
        held: list[float] = []
        with bench.arena(kind) as arena:
            for _ in range(size.turns):
                calm.append(_rate_of_last(arena, size.jobs, before=size.rows))
                with snapshot(arena):
                    held.append(_rate_of_last(arena, size.jobs, before=size.rows))
        ours = finding.add(f"{kind.setting}, snapshot held", held, RATE)
        finding.ratio(ours, finding.add(f"{kind.setting}, nothing held", calm, RATE), at_least=0.9)
    return finding


def _rate_of_last(arena: Arena, jobs: int, *, before: int) -> float:
    """jobs/s of the last ones of a backlog, behind others."""
    total = before + jobs
    arena.fill(total)
    arena.calm()
    with arena.workers() as processes:
        arena.wait_for_starts(total, processes)
    times = sorted(arena.starts.of(number)[0] for number in range(total))
    return jobs / (times[-1] - times[-jobs])


def _rate_of_others(arena: Arena, jobs: int, *, blocked: int) -> float:
    """From the start of the workers until the last of the others has started."""
    arena.tell("empty")
    arena.prepare_starts(blocked + jobs)
    if blocked:
        arena.tell("blocked", first=0, jobs=blocked, seconds=BLOCKED_FOR)
    arena.tell("bulk", first=blocked, jobs=jobs)
    arena.calm()
    with arena.workers() as processes:
        began = time.monotonic()
        arena.wait_for_starts(jobs, processes, first=blocked)
        return jobs / (time.monotonic() - began)
