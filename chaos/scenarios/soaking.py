"""The soak: everything at once, for a long time."""

from __future__ import annotations

import time
from pathlib import Path

from chaos import chores
from chaos.fleet import Fleet, Member
from chaos.scenario import Size, scenario
from chaos.stage import Stage
from pgqueue import DuplicateJob

BACKLOG = 300
"""Jobs that wait at most: a soak that only falls behind shows nothing."""

TASKS = (chores.call, chores.call_async, chores.pay, chores.pay_async)

CONNECTIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE split_part(application_name, ' ', 1) = :name"
)
TERMINATE = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE split_part(application_name, ' ', 1) = :name
"""
KILLS = 4
"""At least, however slow the machine is: or it would show nothing in its short form."""
GROWTH = 1.25
"""How much larger a worker may be at the end than after the first third."""


@scenario(
    promises="P1 P2 P3 P4 P5 P10",
    research="T36",
    full=Size(workers=3, seconds=1800),
    short=Size(workers=2, seconds=4),
    planted={"rescue_loses_the_message": "no worker will ever run it"},
    alone=True,
    in_battery=False,
)
def soak(stage: Stage, size: Size) -> None:
    """Random faults of every kind for half an hour: nothing is lost, and nothing grows."""
    fleets = [
        stage.fleet(mode, size.workers, poll_interval=0.1, slow_grace=5)
        for mode in ("lease", "transaction")
    ]
    for fleet in fleets:
        fleet.until_registered()
    spared = [fleet.members[0] for fleet in fleets]
    deadline = time.monotonic() + size.seconds
    sizes: list[tuple[int, int]] = []
    while time.monotonic() < deadline or stage.counts["kills"] < KILLS:
        _enqueue_some(stage)
        _do_harm(stage, stage.dice.choice(fleets), spared)
        sizes.append(_size_of(stage, spared))
    stage.until_ended(seconds=120)
    for fleet in fleets:
        fleet.stop()
    _nothing_grows(stage, sizes)
    count = "SELECT outcome, count(*) FROM pgqueue.jobs WHERE outcome IS NOT NULL GROUP BY 1"
    stage.judge(**{row[0]: row[1] for row in stage.rows(count)})


def _enqueue_some(stage: Stage) -> None:
    if stage.unfinished() < BACKLOG:
        task = stage.dice.choice(TASKS).options(max_attempts=1000)
        stage.enqueue(task, [(stage.dice.choice((0, 1, 5, 50)),)] * stage.dice.randrange(1, 60))


def _do_harm(stage: Stage, fleet: Fleet, spared: list[Member]) -> None:
    """One fault, of one member that is not spared."""
    victim = stage.dice.choice([one for one in fleet.members if one not in spared])
    fault = stage.dice.choice(("kill", "freeze", "terminate", "cancel", "requeue", "none", "none"))
    match fault:
        case "kill":
            fleet.kill(victim)
            fleet.add()
        case "freeze":
            victim.freeze()
            stage.count("freezes")
            until = time.monotonic() + stage.dice.uniform(
                0.1, 7 if stage.dice.random() < 0.1 else 1
            )
            stage.until(lambda: time.monotonic() > until, what="it was frozen long enough")
            victim.thaw()
        case "terminate":
            victim.was_harmed = True
            stage.count("terminated connections", stage.scalar(TERMINATE, name=victim.name))
        case "cancel" | "requeue":
            _change_some_job(stage, fault)
        case _:
            pause = time.monotonic() + 0.1
            stage.until(lambda: time.monotonic() > pause, what="a moment passes")


def _change_some_job(stage: Stage, how: str) -> None:
    job = stage.dice.choice(sorted(stage.acknowledged)[-500:])
    with stage.queue.session() as session:
        try:
            change = stage.queue.cancel if how == "cancel" else stage.queue.requeue
            change(session, job)
            session.commit()
        except DuplicateJob:
            return
    stage.count(f"{how}s")


def _size_of(stage: Stage, members: list[Member]) -> tuple[int, int]:
    """Kilobytes of memory and the number of connections of these workers."""
    memory = 0
    for member in members:
        status = Path(f"/proc/{member.pid}/status")
        if status.exists():  # Linux
            line = next(one for one in status.read_text().splitlines() if one.startswith("VmRSS"))
            memory += int(line.split()[1])
    return memory, sum(stage.scalar(CONNECTIONS, name=member.name) for member in members)


def _nothing_grows(stage: Stage, sizes: list[tuple[int, int]]) -> None:
    early, late = sizes[len(sizes) // 3], max(sizes[-len(sizes) // 10 :])
    stage.counts["kB of memory"] = late[0]
    stage.expect(late[0] <= early[0] * GROWTH, f"memory has grown from {early[0]} to {late[0]} kB")
    stage.expect(late[1] <= early[1] + 6, f"connections have grown from {early[1]} to {late[1]}")
