"""What it costs to have a worker that has nothing to do."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from benchmarks.arena import Arena
from benchmarks.case import Bench, Finding, Size, case
from benchmarks.systems import PGQUEUE

SETTLED_AFTER = 1.0
"""Seconds; by then the worker has looked at everything once."""
MODES = ("lease", "transaction")
MOST_CONNECTIONS = 4


@case(smoke=Size(jobs=1), usual=Size(jobs=20), full=Size(jobs=60, turns=3))
def idle(bench: Bench, size: Size) -> Finding:
    """An idle worker with ten slots, for some seconds: what it holds, asks, writes and computes."""
    finding = Finding()
    for mode in MODES:
        with bench.arena(PGQUEUE.given(f"{mode} mode", mode=mode)) as arena:
            looks = [_look(arena, size.jobs) for _ in range(size.turns)]
        connections = finding.add(f"{mode}, connections", [look.connections for look in looks], "")
        asked = finding.add(f"{mode}, transactions", [look.transactions for look in looks], "/s")
        finding.add(f"{mode}, WAL", [look.wal for look in looks], "bytes/s")
        busy = finding.add(f"{mode}, processor", [look.processor for look in looks], "% of a core")
        finding.bound(connections, at_most=MOST_CONNECTIONS)
        finding.bound(asked, at_most=4)
        finding.bound(busy, at_most=0.5)
        finding.remarks.append(f"In {mode} mode: {looks[-1].names}.")
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


def _look(arena: Arena, seconds: float) -> Look:
    with arena.workers() as [process]:
        _until_registered(arena)
        time.sleep(SETTLED_AFTER)
        arena.calm()
        before = _read(arena, process.pid)
        time.sleep(seconds)
        after = _read(arena, process.pid)
        names = _connections(arena)
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


def _read(arena: Arena, pid: int) -> Reading:
    [[transactions, wal]] = arena.sql(
        "SELECT xact_commit + xact_rollback, CAST(pg_current_wal_lsn() - '0/0' AS bigint)"
        " FROM pg_stat_database WHERE datname = current_database()"
    )
    return Reading(time.monotonic(), transactions, wal, _processor_seconds(pid))


def _processor_seconds(pid: int) -> float:
    """Of all threads of a process; 0 where the system does not say."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _connections(arena: Arena) -> Counter[str]:
    """Of the worker, by what they are for."""
    rows = arena.sql(
        "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE '% worker %'"
    )
    return Counter(name.rpartition(" ")[2] for (name,) in rows)
