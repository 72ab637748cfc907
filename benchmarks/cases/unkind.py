"""Speed in an unkind world: old snapshots, late commits, wake-ups, history."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from benchmarks.arena import Arena
from benchmarks.case import Bench, Finding, Size, case
from benchmarks.cases.enqueues import clients, enqueue_at_once
from benchmarks.systems import PGQUEUE

CHUNK = 5_000
BACKLOG = 20_000
"""Waiting at any time while jobs are enqueued and run in a steady stream."""
FINISHED = """
    INSERT INTO pgqueue.jobs (queue, task, args, priority, run_at, max_attempts,
        outcome, attempts, started_at, finished_at)
    SELECT 'default', 'nothing', jsonb_build_object('number', number), 5,
        clock_timestamp() - interval '1 day', 10,
        'succeeded', 1, clock_timestamp(), clock_timestamp()
    FROM generate_series(1, %s::int) AS number
"""


@case(
    smoke=Size(jobs=20_000, turns=1),
    usual=Size(jobs=300_000, turns=1),
    full=Size(jobs=1_000_000, turns=3),
)
def heldsnapshot(bench: Bench, size: Size) -> Finding:
    """The last tenth of a stream of jobs that two workers run while a transaction holds its
    snapshot, compared with the same tenth without the transaction."""
    finding = Finding()
    calm: list[float] = []
    held: list[float] = []
    with bench.arena(PGQUEUE) as arena:
        for _ in range(size.turns):
            calm.append(_last_tenth(arena, size.jobs))
            with snapshot(arena):
                held.append(_last_tenth(arena, size.jobs))
    ours = finding.add("snapshot held", held, "jobs/s")
    finding.ratio(ours, finding.add("nothing held", calm, "jobs/s"), at_least=0.9)
    return finding


@case(
    smoke=Size(rows=500, jobs=500),
    usual=Size(rows=50_000, jobs=30_000),
    full=Size(rows=50_000, jobs=100_000),
)
def late_commits(bench: Bench, size: Size) -> Finding:
    """The wait of jobs that are committed long after they were enqueued, behind the cursor of a
    worker that is busy with newer jobs."""
    finding = Finding()
    with bench.arena(PGQUEUE) as arena:
        total = size.rows + size.jobs
        arena.fill(total, bulk=0)
        with psycopg.connect(arena.url) as late:
            _enqueue_by_hand(late, 0, size.rows)
            with arena.workers() as processes:
                arena.tell("bulk", first=size.rows, jobs=size.jobs)
                arena.wait_for_starts(200, processes, first=size.rows)
                late.commit()
                committed_at = time.monotonic()
                arena.wait_for_starts(total, processes)
    waits = [arena.starts.of(number)[0] - committed_at for number in range(size.rows)]
    last = finding.add(f"until the last of {size.rows:,} started", [max(waits)], "s")
    finding.bound(last, at_most=6.0)
    return finding


@case(
    smoke=Size(jobs=400),
    usual=Size(jobs=10_000),
    full=Size(jobs=50_000, turns=3),
)
def slow_among_quick(bench: Bench, size: Size) -> Finding:
    """How long a no-op job waits behind a slow job while later no-ops start.  Two workers have ten
    slots each, and sixteen of the jobs take a second: more than the slots of one worker, fewer
    than those of both."""
    finding = Finding()
    waits: list[float] = []
    for _ in range(size.turns):
        with bench.arena(PGQUEUE) as arena:
            arena.fill(size.jobs, bulk=0)
            with psycopg.connect(arena.url) as connection:
                _enqueue_by_hand(connection, 0, size.jobs, slow=max(size.jobs // 16, 1))
            with arena.workers(2) as processes:
                arena.wait_for_starts(size.jobs, processes)
                arena.wait_until_none_is_left(processes)
            waits.append(1000 * _longest_overtaken(arena, size.jobs))
    longest = finding.add("longest wait while later jobs start", waits, "ms")
    finding.bound(longest, at_most=300)
    return finding


def _longest_overtaken(arena: Arena, jobs: int) -> float:
    """Seconds between the start of a job and the first start of a later one."""
    longest, first_of_later = 0.0, float("inf")
    for number in reversed(range(jobs)):
        started = arena.starts.of(number)[0]
        longest = max(longest, started - first_of_later)
        first_of_later = min(first_of_later, started)
    return longest


@case(
    smoke=Size(jobs=20, clients=2),
    usual=Size(jobs=1_000, turns=3),
    full=Size(jobs=3_000, turns=7),
)
def wake_ups(bench: Bench, size: Size) -> Finding:
    """Eight clients that enqueue while a worker is busy, with and without notifications."""
    finding = Finding()
    rates: dict[str, list[float]] = {"with notifications": [], "without": []}
    total = size.jobs * size.clients
    with clients(bench, size.clients) as arenas:
        for _ in range(size.turns):
            for kind, found in rates.items():
                arenas[0].fill(total + BACKLOG, bulk=0)
                arenas[0].tell("bulk", first=total, jobs=BACKLOG)
                with arenas[0].workers() as processes:
                    arenas[0].wait_for_starts(1, processes, first=total)
                    notify = kind == "with notifications"
                    found.append(enqueue_at_once(arenas, size.jobs, notify=notify))
                    arenas[0].wait_for_starts(total + BACKLOG, processes)
    ours, without = (finding.add(name, values, "jobs/s") for name, values in rates.items())
    finding.ratio(ours, without, at_least=0.95)
    return finding


@case(
    smoke=Size(rows=2_000, jobs=500, turns=1),
    usual=Size(rows=1_000_000, jobs=30_000, turns=3),
    full=Size(rows=10_000_000, jobs=50_000, turns=5),
)
def history(bench: Bench, size: Size) -> Finding:
    """A drain, an enqueue and the list of failed jobs in a database with many ended jobs, compared
    with a database without them."""
    finding = Finding()
    with bench.arena(PGQUEUE) as empty, bench.arena(PGQUEUE) as full:
        full.sql(FINISHED, size.rows)
        for arena in (empty, full):
            arena.calm()
        figures: dict[str, tuple[list[float], list[float]]] = {}
        for _ in range(size.turns):
            for place, arena in enumerate((empty, full)):
                for name, value in _day(arena, size.jobs).items():
                    figures.setdefault(name, ([], []))[place].append(value)
    for name, (without, kept) in figures.items():
        unit = "jobs/s" if name in ("drain", "enqueue") else "ms"
        some = finding.add(f"{name}, {size.rows:,} finished", kept, unit)
        none = finding.add(f"{name}, none", without, unit)
        if unit == "jobs/s":
            finding.ratio(some, none, at_least=0.9)
        else:
            finding.ratio(some, none, at_most=1.1)
    return finding


def _day(arena: Arena, jobs: int) -> dict[str, float]:
    """What is done in a day, in small; leaves the finished jobs of before as they are."""
    with psycopg.connect(arena.url, autocommit=True) as connection:
        connection.execute("DELETE FROM pgqueue.jobs WHERE args ? 'today'")
        arena.prepare_starts(jobs)
        began = time.monotonic()
        _enqueue_by_hand(connection, 0, jobs)
        enqueue = jobs / (time.monotonic() - began)
        arena.calm()
        with arena.workers() as processes:
            arena.wait_for_starts(jobs, processes)
            while arena.sql("SELECT count(*) FROM pgqueue.leases")[0][0]:
                time.sleep(0.01)
            ended = time.monotonic()
        drain = jobs / (ended - min(arena.starts.of(number)[0] for number in range(jobs)))
        failed = _milliseconds(connection, FAILED)
    return {"drain": drain, "enqueue": enqueue, "the failed list": failed}


FAILED = """
    SELECT job.* FROM pgqueue.dead_letters AS letter JOIN pgqueue.jobs AS job ON id = job_id
    ORDER BY letter.finished_at DESC, job_id DESC LIMIT 50
"""


def _milliseconds(connection: psycopg.Connection[Any], statement: str) -> float:
    times = []
    for _ in range(20):
        began = time.perf_counter()
        connection.execute(statement.encode()).fetchall()
        times.append(1000 * (time.perf_counter() - began))
    return sorted(times)[len(times) // 2]


def _enqueue_by_hand(
    connection: psycopg.Connection[Any], first: int, jobs: int, *, slow: int = 10**9
) -> None:
    """In the transaction of this connection, by the statement that pgqueue uses; every so many
    take a second."""
    connection.execute(
        """
        WITH job AS (
            INSERT INTO pgqueue.jobs (queue, task, args, priority, run_at, max_attempts)
            SELECT 'default', 'nothing',
                jsonb_build_object('number', number, 'today', 1,
                    'seconds', CASE WHEN number %% %s = 50 THEN 1 ELSE 0 END),
                5, clock_timestamp(), 10
            FROM generate_series(%s::int, %s::int) AS number
            RETURNING id, run_at
        )
        INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task)
        SELECT 'default', 5, run_at, id, 'nothing' FROM job
        """,
        (slow, first, first + jobs - 1),
    )


def _last_tenth(arena: Arena, jobs: int) -> float:
    """jobs/s of the last tenth of a stream that two workers run."""
    arena.fill(jobs, bulk=0)
    with arena.workers(2) as processes, _stream(arena, jobs):
        arena.wait_for_starts(jobs, processes)
    times = sorted(arena.starts.of(number)[0] for number in range(jobs))
    tenth = jobs // 10
    return tenth / (times[-1] - times[-tenth])


@contextmanager
def _stream(arena: Arena, jobs: int) -> Iterator[None]:
    """Enqueue in chunks, as long as less than a backlog waits."""

    def enqueue() -> None:
        first, started = 0, 0
        while first < jobs:
            while started < first and arena.starts.of(started)[1]:
                started += 1
            if first - started >= BACKLOG:
                time.sleep(0.005)
                continue
            count = min(CHUNK, jobs - first)
            arena.tell("bulk", first=first, jobs=count)
            first += count

    thread = threading.Thread(target=enqueue)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextmanager
def snapshot(arena: Arena) -> Iterator[None]:
    with psycopg.connect(arena.url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1")  # no table: TRUNCATE would wait for its lock
        yield
