"""How fast a workflow goes from job to job, and a function from step to step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.arena import Arena, Spoiled
from benchmarks.case import Bench, Finding, Series, Size, case, in_turns
from benchmarks.cases.unkind import snapshot
from benchmarks.systems import ABSURD, CELERY, DBOS, PG_BOSS, PGQUEUE, System

WARM_UP = 10
"""The length of the workflow that a worker runs first."""
ROUND = 1.0
"""Seconds: how often the others look, at most."""
REDIS = "Redis holds its data in memory; its append-only file is flushed to disk once a second."


@case(
    smoke=Size(jobs=20),
    usual=Size(jobs=1_000, turns=3),
    full=Size(jobs=1_000, turns=7),
)
def workflow_fan(bench: Bench, size: Size) -> Finding:
    """A no-op job, 1,000 after it, and one after all of these: from the call that enqueues the
    workflow until the last starts, with an idle worker."""
    finding = Finding()
    goals = [(PG_BOSS, 5), (CELERY, 10), (DBOS, 50), (ABSURD, 50)]
    series = _beside(bench, size, finding, _from_call, "fan", *(system for system, _ in goals))
    ours = series[PGQUEUE.name]
    finding.bound(ours, at_most=0.25 * size.jobs / 1_000)
    for system, least in goals:
        if system.name in series:
            finding.ratio(series[system.name], ours, at_least=least)
    return finding


@case(
    smoke=Size(jobs=10),
    usual=Size(jobs=100, turns=5),
    full=Size(jobs=100, turns=7),
)
def workflow_chain(bench: Bench, size: Size) -> Finding:
    """A chain of 100 no-op jobs: from the call that enqueues the workflow until the last starts,
    with an idle worker."""
    finding = Finding()
    series = _beside(bench, size, finding, _from_call, "chain", CELERY)
    ours = series[PGQUEUE.name]
    finding.bound(ours, at_most=0.6 * size.jobs / 100)
    if CELERY.name in series:
        finding.ratio(ours, series[CELERY.name], at_most=1)
    return finding


@case(
    smoke=Size(jobs=10),
    usual=Size(jobs=100, turns=5),
    full=Size(jobs=100, turns=7),
)
def steps(bench: Bench, size: Size) -> Finding:
    """100 steps in one function, each recorded: from the start of the first to that of the last."""
    finding = Finding()
    goals = [(DBOS, 0.7), (ABSURD, 0.5)]
    series = _beside(bench, size, finding, _from_first, "steps", *(system for system, _ in goals))
    for system, most in goals:
        if system.name in series:
            finding.ratio(series[PGQUEUE.name], series[system.name], at_most=most)
    return finding


@case(
    smoke=Size(jobs=50),
    usual=Size(jobs=10_000, turns=3),
    full=Size(jobs=10_000, turns=7),
)
def jobs_of_a_workflow(bench: Bench, size: Size) -> Finding:
    """A no-op job, 10,000 after it, and one after all of these, beside as many jobs of which none
    waits: from the first start until none is left."""
    finding = Finding()
    fan = PGQUEUE.given("fan-out and fan-in", graph="fan")
    with bench.arenas(fan, PGQUEUE) as arenas:
        found = in_turns(arenas, size.turns, lambda arena: size.jobs / arena.drain(size.jobs))
    series = {name: finding.add(name, values, "s") for name, values in found.items()}
    finding.bound(series[fan.label], at_most=1.5 * size.jobs / 10_000)
    finding.ratio(series[fan.label], series[PGQUEUE.label], at_most=1.1)
    return finding


@case(
    smoke=Size(jobs=10, rows=20),
    usual=Size(jobs=1_000, rows=50_000),
    full=Size(jobs=1_000, rows=300_000, turns=3),
)
def held_workflows(bench: Bench, size: Size) -> Finding:
    """A no-op job, 1,000 after it, and one after all of these, behind many such workflows, while a
    transaction holds its snapshot, compared with the same without the transaction: from the call
    that enqueues the workflow until the last starts."""
    finding = Finding()
    calm: list[float] = []
    held: list[float] = []
    with bench.arena(PGQUEUE.given("fan-out and fan-in", graph="fan")) as arena:
        for _ in range(size.turns):
            calm += _last_of_many(arena, size)
            with snapshot(arena):
                held += _last_of_many(arena, size)
    without = finding.add("nothing held", calm, "s")
    finding.ratio(without, finding.add("snapshot held", held, "s"), at_least=0.9)
    return finding


def _last_of_many(arena: Arena, size: Size) -> list[float]:
    """The seconds of the last tenth of the workflows that one worker runs, one after the other."""
    count = size.rows // size.jobs
    arena.clear(count * size.jobs)
    seconds = []
    with arena.workers() as processes:
        for number in range(count):
            first, called = number * size.jobs, time.monotonic()
            arena.tell("bulk", first=first, jobs=size.jobs)
            arena.wait_for_starts(size.jobs, processes, first=first)
            seconds.append(arena.starts.of(first + size.jobs - 1)[0] - called)
        arena.wait_until_none_is_left(processes)
    arena.verify(count * size.jobs)
    return seconds[-max(count // 10, 1) :]


def _beside(
    bench: Bench,
    size: Size,
    finding: Finding,
    measure: Callable[[Arena, int], float],
    graph: str,
    *others: System,
) -> dict[str, Series]:
    """The seconds of one graph, by the name of the system, ours first."""
    systems = (system.given("", graph=graph) for system in (PGQUEUE, *others))
    with bench.arenas(*systems) as arenas:
        found = in_turns(arenas, size.turns, lambda arena: measure(arena, size.jobs))
    if CELERY.name in found:
        finding.remarks.append(REDIS)
    return {name: finding.add(name, values, "s") for name, values in found.items()}


def _from_call(arena: Arena, jobs: int) -> float:
    called, started = _run(arena, jobs)
    return started[-1] - called


def _from_first(arena: Arena, jobs: int) -> float:
    _, started = _run(arena, jobs)
    return started[-1] - started[0]


def _run(arena: Arena, jobs: int) -> tuple[float, list[float]]:
    """A graph of so many jobs, behind one that warms the worker up: when it was enqueued, and when
    each of its jobs has started."""
    arena.clear(WARM_UP + jobs)
    with arena.workers() as processes:
        arena.tell("bulk", first=0, jobs=WARM_UP)
        arena.wait_for_starts(WARM_UP, processes)
        arena.wait_until_none_is_left(processes)
        time.sleep(ROUND * random.random())  # each turn meets another moment of a round
        called = time.monotonic()
        arena.tell("bulk", first=WARM_UP, jobs=jobs)
        arena.wait_for_starts(jobs, processes, first=WARM_UP)
        arena.wait_until_none_is_left(processes)
    arena.verify(WARM_UP + jobs)
    started = [arena.starts.of(WARM_UP + number)[0] for number in range(jobs)]
    if (started[0], started[-1]) != (min(started), max(started)):
        raise Spoiled(f"{arena.label}: a job has not waited for the ones before it")
    return called, started
