"""What it costs to have a worker that has nothing to do."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from sqlalchemy import make_url

from benchmarks.arena import Arena
from benchmarks.case import Bench, Finding, Size, case
from benchmarks.cases.claims import TOMORROW, add_waiting
from benchmarks.systems import PGQUEUE

SETTLED_AFTER = 15.0
"""Seconds, or as many as are measured; by then it has given back what it needed at its start."""
MOST = (("connections", "", 3), ("transactions", "/s", 4), ("processor", "% of a core", 0.5))
"""Of one worker."""

JOBS_FOR_A_SCHEDULE = 100
SCHEDULES = """
    INSERT INTO pgqueue.schedules (name, task, cron, next_at)
    SELECT 'at three ' || number, 'nothing', '0 3 * * *', clock_timestamp() + interval '1 day'
    FROM generate_series(1, %s) AS number
"""

Outside = psycopg.Connection[Any]
"""To another database: a look does not count itself."""


@case(smoke=Size(jobs=1), usual=Size(jobs=20), full=Size(jobs=60, turns=3))
def idle(bench: Bench, size: Size) -> Finding:
    """An idle worker with ten slots, for some seconds: what it holds, asks, writes and computes."""
    finding = Finding()
    with _without_autovacuum(bench), bench.arena(PGQUEUE) as arena:
        looks = [_look(bench, arena, size.jobs) for _ in range(size.turns)]
    for what, unit, most in MOST:
        row = finding.add(what, [getattr(look, what) for look in looks], unit)
        finding.bound(row, at_most=most)
    finding.add("WAL", [look.wal for look in looks], "bytes/s")
    finding.remarks.append(f"The connections: {looks[-1].names}.")
    return finding


@case(
    smoke=Size(jobs=1, rows=1_000),
    usual=Size(jobs=20, rows=1_000_000, turns=2),
    full=Size(jobs=60, rows=1_000_000, turns=3),
)
def idle_beside_future(bench: Bench, size: Size) -> Finding:
    """The same on empty tables, and beside a million jobs and ten thousand schedules of the next
    day."""
    with (
        _without_autovacuum(bench),
        bench.arena(PGQUEUE.given("empty tables")) as empty,
        bench.arena(PGQUEUE.given("jobs and schedules")) as full,
    ):
        add_waiting(full, size.rows, delay=TOMORROW)
        full.sql(SCHEDULES, size.rows // JOBS_FOR_A_SCHEDULE)
        turns = [
            [_look(bench, arena, size.jobs) for arena in (empty, full)] for _ in range(size.turns)
        ]
    finding = Finding()
    for what, unit, most in MOST:
        _, beside = (
            finding.add(f"{arena.label}, {what}", [getattr(look, what) for look in looks], unit)
            for arena, looks in zip((empty, full), zip(*turns, strict=True), strict=True)
        )
        finding.bound(beside, at_most=most)
    return finding


class Look(NamedTuple):
    connections: float
    names: str
    transactions: float
    wal: float
    processor: float


class Reading(NamedTuple):
    at: float
    transactions: int
    wal: int
    processor: float


@contextmanager
def _without_autovacuum(bench: Bench) -> Iterator[None]:
    """Its transactions and its WAL are not the worker's."""
    with psycopg.connect(bench.url, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET autovacuum = off")
        connection.execute("SELECT pg_reload_conf()")
        try:
            yield
        finally:
            connection.execute("ALTER SYSTEM RESET autovacuum")
            connection.execute("SELECT pg_reload_conf()")


def _look(bench: Bench, arena: Arena, seconds: float) -> Look:
    with (
        arena.workers() as [process],
        psycopg.connect(bench.url, autocommit=True) as outside,
    ):
        _until_registered(arena)
        arena.calm()
        time.sleep(min(SETTLED_AFTER, seconds))
        database = make_url(arena.url).database
        before = _read(outside, database, process.pid)
        time.sleep(seconds)
        after = _read(outside, database, process.pid)
        names = _connections(outside, database)
    took = after.at - before.at
    return Look(
        sum(names.values()),
        ", ".join(f"{name} {count}" for name, count in sorted(names.items())),
        (after.transactions - before.transactions) / took,
        (after.wal - before.wal) / took,
        100 * (after.processor - before.processor) / took,
    )


def _until_registered(arena: Arena) -> None:
    deadline = time.monotonic() + 30
    while not arena.sql("SELECT 1 FROM pgqueue.workers") and time.monotonic() < deadline:
        time.sleep(0.05)


def _read(outside: Outside, database: str | None, pid: int) -> Reading:
    [[transactions, wal]] = outside.execute(
        "SELECT xact_commit + xact_rollback, CAST(pg_current_wal_lsn() - '0/0' AS bigint)"
        " FROM pg_stat_database WHERE datname = %s",
        [database],
    ).fetchall()
    return Reading(time.monotonic(), transactions, wal, _processor_seconds(pid))


def _processor_seconds(pid: int) -> float:
    """Of all threads of a process; 0 where the system does not say."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _connections(outside: Outside, database: str | None) -> Counter[str]:
    """Of the worker, by what they are for."""
    rows = outside.execute(
        "SELECT application_name FROM pg_stat_activity WHERE datname = %s"
        " AND application_name ~ ' worker '",
        [database],
    ).fetchall()
    return Counter(name.rpartition(" ")[2] for (name,) in rows)
