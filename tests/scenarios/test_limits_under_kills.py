"""Limits hold over many worker processes while workers are killed."""

import random
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import limited_tasks
import pytest
from worker_rig import Rig

pytestmark = pytest.mark.journey

KEYS = ("red", "green", "blue")
WORKERS = 8
KILLS = 6


def most_at_once(notes: list[dict[str, Any]], *, by_key: bool = True) -> int:
    """The most jobs of a key that ran at the same moment, by the order of what they wrote.

    A job whose worker was killed counts until it starts and ends again: it keeps its place.
    """
    running: dict[str, set[int]] = defaultdict(set)
    most = 0
    for one in notes:
        of_key = running[one["key"] if by_key else ""]
        if one["word"] == "start":
            of_key.add(one["job"])
            most = max(most, len(of_key))
        else:
            of_key.discard(one["job"])
    return most


def start_workers(rig: Rig, count: int = WORKERS) -> None:
    for _ in range(count):
        rig.start(waits=False, modules=["limited_tasks"], poll_interval=0.2, concurrency=6)


def kill_some(rig: Rig, count: int = KILLS) -> None:
    """Kill a worker that has just seen a job start, and start another, so many times."""
    for _ in range(count):
        seen = len(rig.notes("start"))
        rig.until(partial(has_gone_on, rig, seen))
        victim = random.choice([worker for worker in rig.workers if worker.is_running])
        victim.kill()
        start_workers(rig, 1)


def has_gone_on(rig: Rig, seen: int) -> bool:
    return len(rig.notes("start")) > seen + 3 or not rig.unfinished()


def test_several_limits_of_a_task_hold_together(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        start_workers(rig, 4)
        with rig.session() as session:
            rows = [(key, 5) for _ in range(20) for key in KEYS]
            limited_tasks.three_in_all.enqueue_many(session, rows)
            session.commit()

        kill_some(rig, 2)
        rig.until_ended()

        assert most_at_once(rig.notes()) <= 2
        assert most_at_once(rig.notes(), by_key=False) <= 3
        assert rig.outcomes() == {"succeeded": len(rows)}


def test_strict_order_is_first_in_first_out_by_key_while_workers_are_killed(
    database_url: str, tmp_path: Path
) -> None:
    """A job that fails twice keeps the others of its key back until it has succeeded."""
    with Rig(database_url, tmp_path) as rig:
        start_workers(rig)
        with rig.session() as session:
            rows = [(key, n, 2 * (n % 5 == 3)) for n in range(15) for key in KEYS]
            limited_tasks.in_order.enqueue_many(session, rows)
            session.commit()

        kill_some(rig, 4)
        rig.until_ended()

        assert most_at_once(rig.notes()) == 1
        for key in KEYS:
            numbers = [note["number"] for note in rig.notes("start") if note["key"] == key]
            assert numbers == sorted(numbers)
            assert set(numbers) == set(range(15))
        assert rig.outcomes() == {"succeeded": len(rows)}
