"""How fast a workflow goes from job to job."""

from __future__ import annotations

from benchmarks.arena import Arena
from benchmarks.case import Bench, Finding, Size, case, in_turns
from benchmarks.systems import PGQUEUE

CHAIN = 100


@case(
    smoke=Size(jobs=50),
    usual=Size(jobs=1_000, turns=5),
    full=Size(jobs=10_000, turns=7),
)
def workflows(bench: Bench, size: Size) -> Finding:
    """A no-op job, many after it, and one after all of these; a chain of 100 no-op jobs; as many
    jobs as in the first, of which none waits.  From the first start until none is left."""
    finding = Finding()
    fan = PGQUEUE.given(f"fan-out and fan-in of {size.jobs:,}", graph="fan")
    chain = PGQUEUE.given(f"chain of {CHAIN}", graph="chain")
    with bench.arenas(fan, PGQUEUE) as arenas:
        found = in_turns(arenas, size.turns, lambda arena: _seconds(arena, size.jobs))
    with bench.arenas(chain) as arenas:
        found |= in_turns(arenas, size.turns, lambda arena: _seconds(arena, CHAIN))
    series = {name: finding.add(name, values, "s") for name, values in found.items()}
    finding.ratio(series[fan.label], series[PGQUEUE.label])
    finding.bound(series[fan.label], at_most=0.25 * size.jobs / 1_000)
    finding.bound(series[chain.label], at_most=0.6)
    return finding


def _seconds(arena: Arena, jobs: int) -> float:
    return jobs / arena.drain(jobs)
