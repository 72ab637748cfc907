"""How fast waiting jobs are run and finished."""

from __future__ import annotations

from benchmarks.case import Bench, Finding, Series, Size, case, in_turns
from benchmarks.limits import limits_of
from benchmarks.systems import GRAPHILE, HANDWRITTEN, PGQUEUE, PGQUEUER, System

RATE = "jobs/s"


@case(
    smoke=Size(jobs=1_000),
    usual=Size(jobs=50_000, turns=3),
    full=Size(jobs=50_000, turns=7),
)
def drain(bench: Bench, size: Size) -> Finding:
    """No-op jobs drained by one worker process, sync handlers, default safety."""
    finding = Finding()
    found = _drains(bench, size, finding, PGQUEUE, GRAPHILE, PGQUEUER, limit=True)
    ours = found[PGQUEUE.label]
    _compare(finding, ours, found.get(GRAPHILE.label), at_least=1.6)
    _compare(finding, ours, found.get(PGQUEUER.label), at_least=3.0)
    _compare(finding, ours, found.get("pgbench"), at_least=0.65)
    return finding


@case(
    smoke=Size(jobs=1_000),
    usual=Size(jobs=30_000, turns=3),
    full=Size(jobs=50_000, turns=7),
)
def drain_async(bench: Bench, size: Size) -> Finding:
    """The drain with ``async def`` handlers."""
    finding = Finding()
    ours = PGQUEUE.given("async", handler="async")
    found = _drains(bench, size, finding, ours, PGQUEUER)
    _compare(finding, found[ours.label], found.get(PGQUEUER.label), at_least=2.0)
    return finding


@case(
    smoke=Size(jobs=1_000),
    usual=Size(jobs=50_000, turns=3),
    full=Size(jobs=100_000, turns=7),
)
def drain_by_two(bench: Bench, size: Size) -> Finding:
    """The drain with two worker processes."""
    finding = Finding()
    found = _drains(bench, size, finding, PGQUEUE, GRAPHILE, workers=2)
    _compare(finding, found[PGQUEUE.label], found.get(GRAPHILE.label), at_least=1.4)
    return finding


@case(
    smoke=Size(jobs=200),
    usual=Size(jobs=4_000, turns=3),
    full=Size(jobs=10_000, turns=7),
)
def drain_transactional(bench: Bench, size: Size) -> Finding:
    """Transactional handlers with one INSERT each, in separate transactions, compared with
    hand-written loops that do the same, with psycopg and with a Session."""
    finding = Finding()
    pgqueue = PGQUEUE.given("transactional", handler="transactional")
    by_session = HANDWRITTEN.given("with a Session", client="session")
    found = _drains(bench, size, finding, pgqueue, HANDWRITTEN, by_session)
    _compare(finding, found[pgqueue.label], found[HANDWRITTEN.label], at_least=0.64)
    _compare(finding, found[pgqueue.label], found[by_session.label])
    finding.remarks.append("All with ten threads in one process.")
    return finding


def _drains(
    bench: Bench,
    size: Size,
    finding: Finding,
    *systems: System,
    workers: int = 1,
    limit: bool = False,
) -> dict[str, Series]:
    limits = limits_of(bench) if limit else None
    with bench.arenas(*systems) as arenas:
        rates: dict[str, list[float]] = {}
        for _ in range(size.turns):
            turn = in_turns(arenas, 1, lambda arena: arena.drain(size.jobs, workers=workers))
            if limits is not None:
                turn["pgbench"] = [limits.claim_and_complete(size.jobs, batch=500)]
            for name, values in turn.items():
                rates.setdefault(name, []).extend(values)
    return {name: finding.add(name, values, RATE) for name, values in rates.items()}


def _compare(
    finding: Finding, ours: Series, theirs: Series | None, *, at_least: float | None = None
) -> None:
    if theirs is not None:
        finding.ratio(ours, theirs, at_least=at_least)
