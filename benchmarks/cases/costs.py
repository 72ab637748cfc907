"""What a job costs: WAL, memory, and each of the things that make it safe."""

from __future__ import annotations

from pathlib import Path

from benchmarks.arena import Arena
from benchmarks.case import Bench, Finding, Size, case
from benchmarks.systems import PGQUEUE

PADDING = 180
"""Bytes that make a payload of about 200."""


@case(
    smoke=Size(jobs=1_000),
    usual=Size(jobs=50_000, turns=3),
    full=Size(jobs=100_000, turns=5),
)
def wal(bench: Bench, size: Size) -> Finding:
    """WAL per job from enqueue to settle, with a payload of 200 bytes, enqueued in chunks of 1,000
    and drained."""
    finding = Finding()
    totals: list[float] = []
    with bench.arena(PGQUEUE.given("", padding=PADDING)) as arena:
        for _ in range(size.turns):
            arena.tell("empty")
            arena.calm()
            arena.prepare_starts(size.jobs)
            began = _wal(arena)
            arena.tell("bulk", first=0, jobs=size.jobs)
            with arena.workers() as processes:
                arena.wait_for_starts(size.jobs, processes)
                arena.wait_until_none_is_left(processes)
            totals.append((_wal(arena) - began) / size.jobs)
    total = finding.add("WAL, enqueue to done", totals, "bytes a job")
    finding.bound(total, at_most=1000)
    finding.remarks.append("With full-page images after a checkpoint, which each turn begins with.")
    return finding


@case(
    smoke=Size(jobs=5_000),
    usual=Size(jobs=200_000),
    full=Size(jobs=1_000_000),
)
def memory(bench: Bench, size: Size) -> Finding:
    """Resident memory of a worker while it drains, and how much it grows in the last half."""
    finding = Finding()
    marks: list[tuple[int, float]] = []
    with bench.arena(PGQUEUE) as arena:
        arena.fill(size.jobs)
        with arena.workers() as processes:
            for tenth in range(1, 11):
                count = size.jobs * tenth // 10
                arena.wait_for_starts(count, processes)
                # The file in which the handlers count their starts grows with each of them.
                memory = _resident(processes[0].pid, without=arena.starts_file)
                marks.append((count, memory))
            arena.wait_until_none_is_left(processes)
        arena.verify(size.jobs)
    most = finding.add("most", [max(mark for _, mark in marks)], "MB")
    (first, low), (last, high) = marks[4], marks[-1]
    growth = 100_000 * (high - low) / (last - first)
    slope = finding.add("growth in the last half", [growth], "MB per 100,000 jobs")
    finding.bound(most, at_most=80)
    finding.bound(slope, at_most=1)
    return finding


@case(
    smoke=Size(jobs=1_000),
    usual=Size(jobs=50_000, turns=3),
    full=Size(jobs=50_000, turns=7),
)
def safety(bench: Bench, size: Size) -> Finding:
    """A drain with one safety feature removed or added, which shows the cost of each."""
    finding = Finding()
    rates: dict[str, list[float]] = {}
    systems = [PGQUEUE.given(name, **OPTIONS.get(name, {})) for name in CHANGES]
    with bench.arenas(*systems) as arenas:
        for arena, statements in zip(arenas, CHANGES.values(), strict=True):
            for statement in statements:
                arena.sql(statement)
        for _ in range(size.turns):
            for arena in arenas:
                rates.setdefault(arena.system.setting, []).append(arena.drain(size.jobs))
    series = [finding.add(name, values, "jobs/s") for name, values in rates.items()]
    for one in series[1:]:
        finding.ratio(one, series[0])
    return finding


FOREIGN_KEY = "ALTER TABLE pgqueue.{0} ADD FOREIGN KEY (target_id) REFERENCES pgqueue.jobs (id)"
CHANGES: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "with foreign keys to jobs": (
        FOREIGN_KEY.format("message_queue"),
        FOREIGN_KEY.format("leases"),
    ),
    "without room for updates in place": ("ALTER TABLE pgqueue.jobs RESET (fillfactor)",),
    "without waiting for the disk": (
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off',"
        " current_database()); END $$",
    ),
    "without statistics": (),
}
OPTIONS = {"without statistics": {"statistics": False}}


def _wal(arena: Arena) -> int:
    return int(arena.sql("SELECT pg_current_wal_insert_lsn() - '0/0'")[0][0])


def _resident(pid: int, *, without: Path) -> float:
    """Megabytes, without this mapped file."""
    kilobytes, is_counted = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            is_counted = values[-1:] != [str(without)]
        elif name == "Rss:" and is_counted:
            kilobytes += int(values[0])
    return kilobytes * 1024 / 1e6
