"""What it costs to enqueue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks.arena import Arena
from benchmarks.case import Bench, Finding, Size, case, in_turns
from benchmarks.limits import limits_of
from benchmarks.systems import GRAPHILE, PGQUEUE, PQ, SERVICE, SERVICE_WITH_CELERY
from pgqueue import Job, PgQueue

RATE = "jobs/s"


@case(smoke=Size(jobs=50), usual=Size(jobs=3_000, turns=5), full=Size(jobs=10_000, turns=7))
def enqueue_by_delay(bench: Bench, size: Size) -> Finding:
    """One job by ``delay()`` and its commit, one client."""
    finding = Finding()
    with bench.arenas(PGQUEUE, PQ, GRAPHILE) as arenas:
        rates = in_turns(arenas, size.turns, lambda arena: _one_by_one(arena, size.jobs))
    series = {name: finding.add(name, values, RATE) for name, values in rates.items()}
    if PQ.label in series:
        finding.ratio(series[PGQUEUE.label], series[PQ.label], at_least=1.25)
    return finding


@case(
    smoke=Size(jobs=20, clients=2),
    usual=Size(jobs=1_500, turns=3),
    full=Size(jobs=5_000, turns=7),
)
def enqueue_by_eight(bench: Bench, size: Size) -> Finding:
    """One job by ``delay()`` and its commit, eight client processes at once."""
    finding = Finding()
    rates: list[float] = []
    limits: list[float] = []
    limit = limits_of(bench)
    with clients(bench, size.clients) as arenas:
        for _ in range(size.turns):
            arenas[0].fill(size.jobs * size.clients, bulk=0)
            rates.append(enqueue_at_once(arenas, size.jobs))
            if limit is not None:
                seconds = max(1, size.jobs // 1000)
                limits.append(limit.insert(clients=size.clients, seconds=seconds))
    ours = finding.add("pgqueue", rates, RATE)
    if limits:
        finding.ratio(ours, finding.add("pgbench, INSERT", limits, RATE), at_least=0.6)
    return finding


@case(smoke=Size(jobs=20), usual=Size(jobs=1_000, turns=9), full=Size(jobs=3_000, turns=15))
def enqueue_in_session(bench: Bench, size: Size) -> Finding:
    """One job in a Session and its commit, compared with one bare Core INSERT in a Session."""
    finding = Finding()
    with bench.arena(PGQUEUE) as arena:
        queue = PgQueue(arena.url)
        times = _beside_bare_insert(queue, size)
        queue.engine.dispose()
    bare = finding.add("bare INSERT", times["bare"], "us")
    ours = finding.add("enqueue", times["enqueue"], "us")
    finding.ratio(ours, bare, at_most=1.15)
    return finding


@case(smoke=Size(jobs=50), usual=Size(jobs=1_000, turns=9), full=Size(jobs=3_000, turns=15))
def flask_request(bench: Bench, size: Size) -> Finding:
    """A request of a Flask service that saves a row by ``db.session`` and enqueues a job, compared
    with one that only saves the row, and with one that sends the job to Redis by Celery."""
    finding = Finding()
    bare = SERVICE.given("only the row", enqueues=False)
    with bench.arenas(SERVICE, bare, SERVICE_WITH_CELERY) as arenas:
        rates = in_turns(arenas, size.turns, lambda arena: _requests(arena, size.jobs))
    series = {name: finding.add(name, values, "requests/s") for name, values in rates.items()}
    finding.ratio(series[SERVICE.label], series[bare.label])
    if SERVICE_WITH_CELERY.label in series:
        finding.ratio(series[SERVICE.label], series[SERVICE_WITH_CELERY.label])
    finding.remarks.append("One client in the process of the service, without a network.")
    return finding


@case(smoke=Size(jobs=500), usual=Size(jobs=100_000, turns=3), full=Size(jobs=100_000, turns=7))
def enqueue_in_bulk(bench: Bench, size: Size) -> Finding:
    """Many jobs by ``enqueue_many`` in one Session and its commit."""
    finding = Finding()
    with bench.arenas(PGQUEUE, GRAPHILE) as arenas:
        rates = in_turns(arenas, size.turns, lambda arena: size.jobs / arena.fill(size.jobs))
    series = {name: finding.add(name, values, RATE) for name, values in rates.items()}
    if GRAPHILE.label in series:
        finding.ratio(series[PGQUEUE.label], series[GRAPHILE.label], at_least=1.6)
    return finding


def _one_by_one(arena: Arena, jobs: int) -> float:
    arena.tell("empty")
    arena.calm()
    times = arena.tell("each", first=0, jobs=jobs, gap=0)
    assert arena.tell("left") == jobs
    return float(jobs / (times["returned"][-1] - times["began"]))


def _requests(arena: Arena, requests: int) -> float:
    arena.tell("empty")
    arena.calm()
    times = arena.tell("each", first=0, jobs=requests, gap=0)
    return float(requests / (times["returned"][-1] - times["began"]))


@contextmanager
def clients(bench: Bench, count: int) -> Iterator[list[Arena]]:
    """So many processes that enqueue into one database."""
    with ExitStack() as resources:
        first = resources.enter_context(bench.arena(PGQUEUE))
        others = [first.beside() for _ in range(count - 1)]
        yield [first, *map(resources.enter_context, others)]


def enqueue_at_once(arenas: list[Arena], jobs: int, **more: Any) -> float:
    """Jobs of all clients per second, from the first call to the last return."""
    with ThreadPoolExecutor(len(arenas)) as pool:
        runs = [
            pool.submit(arena.tell, "each", first=place * jobs, jobs=jobs, gap=0, **more)
            for place, arena in enumerate(arenas)
        ]
        times = [run.result() for run in runs]
    ended = max(one["returned"][-1] for one in times)
    return float(jobs * len(arenas) / (ended - min(one["began"] for one in times)))


def _beside_bare_insert(queue: PgQueue, size: Size) -> dict[str, list[float]]:
    @queue.task
    def nothing(number: int) -> None: ...

    jobs = sa.Table("jobs", sa.MetaData(), autoload_with=queue.engine, schema=Job.metadata.schema)
    bare = sa.insert(jobs).values(task="bare", args={"number": 1}).returning(jobs.c.id)

    def insert(session: Session) -> None:
        session.execute(bare).one()
        session.commit()

    def enqueue(session: Session) -> None:
        nothing.enqueue(session, 1)
        session.commit()

    with queue.session() as session:
        _each(insert, session, 200)
        _each(enqueue, session, 200)
        times: dict[str, list[float]] = {"bare": [], "enqueue": []}
        for _ in range(size.turns):
            times["bare"].append(_each(insert, session, size.jobs))
            times["enqueue"].append(_each(enqueue, session, size.jobs))
    return times


def _each(action: Callable[[Session], None], session: Session, times: int) -> float:
    """Microseconds a call."""
    began = time.perf_counter()
    for _ in range(times):
        action(session)
    return 1e6 * (time.perf_counter() - began) / times
