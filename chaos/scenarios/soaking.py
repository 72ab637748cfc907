"""The soak: everything at once, for a long time."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from chaos import sample_tasks
from chaos.environment import Environment
from chaos.scenario import Size, scenario
from chaos.workers import Member, Workers
from pgqueue import DuplicateJob

BACKLOG = 300
"""Jobs that wait at most: a soak that only falls behind shows nothing."""

TASKS = (sample_tasks.call, sample_tasks.call_async, sample_tasks.pay, sample_tasks.pay_async)

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
    full=Size(workers=3, seconds=1800),
    short=Size(workers=2, seconds=4),
    mutated={"rescue_loses_the_message": "no worker will ever run it"},
    alone=True,
    in_battery=False,
)
def soak(environment: Environment, size: Size) -> None:
    """Random faults of every kind for half an hour: nothing is lost, and nothing grows."""
    workers = environment.workers(2 * size.workers, poll_interval=0.1, slow_grace=5)
    workers.until_registered()
    spared = workers.members[:1]
    deadline = time.monotonic() + size.seconds
    sizes: list[tuple[int, int]] = []
    while time.monotonic() < deadline or environment.counts["kills"] < KILLS:
        _enqueue_some(environment)
        _do_harm(environment, workers, spared)
        sizes.append(_size_of(environment, spared))
    environment.until_ended(seconds=120)
    workers.stop()
    _nothing_grows(environment, sizes)
    count = "SELECT outcome, count(*) FROM pgqueue.jobs WHERE outcome IS NOT NULL GROUP BY 1"
    environment.judge(**{row[0]: row[1] for row in environment.rows(count)})


def _enqueue_some(environment: Environment) -> None:
    if environment.unfinished() < BACKLOG:
        task = environment.dice.choice(TASKS).options(max_attempts=1000)
        environment.enqueue(
            task, [(environment.dice.choice((0, 1, 5, 50)),)] * environment.dice.randrange(1, 60)
        )


def _do_harm(environment: Environment, workers: Workers, spared: list[Member]) -> None:
    """One fault, of one member that is not spared."""
    victim = environment.dice.choice([one for one in workers.members if one not in spared])
    fault = environment.dice.choice(
        ("kill", "freeze", "terminate", "cancel", "requeue", "none", "none")
    )
    match fault:
        case "kill":
            workers.kill(victim)
            workers.add()
        case "freeze":
            environment.freeze(victim)
            longest = 7 if environment.dice.random() < 0.1 else 1
            environment.let_pass(environment.dice.uniform(0.1, longest))
            victim.thaw()
        case "terminate":
            victim.was_harmed = True
            environment.count(
                "terminated connections", environment.scalar(TERMINATE, name=victim.name)
            )
        case "cancel" | "requeue":
            _change_some_job(environment, fault)
        case _:
            environment.let_pass(0.1)


def _change_some_job(environment: Environment, how: str) -> None:
    job = environment.dice.choice(sorted(environment.acknowledged)[-500:])
    if how == "requeue":
        with suppress(DuplicateJob):
            environment.requeue(job)
        return
    with environment.queue.session() as session, session.begin():
        environment.queue.cancel(session, job)
    environment.count("cancels")


def _size_of(environment: Environment, members: list[Member]) -> tuple[int, int]:
    """Kilobytes of memory and the number of connections of these workers."""
    memory = 0
    for member in members:
        status = Path(f"/proc/{member.pid}/status")
        if status.exists():  # Linux
            line = next(one for one in status.read_text().splitlines() if one.startswith("VmRSS"))
            memory += int(line.split()[1])
    return memory, sum(environment.scalar(CONNECTIONS, name=member.name) for member in members)


def _nothing_grows(environment: Environment, sizes: list[tuple[int, int]]) -> None:
    early, late = sizes[len(sizes) // 3], max(sizes[-len(sizes) // 10 :])
    environment.counts["kB of memory"] = late[0]
    environment.expect(
        late[0] <= early[0] * GROWTH, f"memory has grown from {early[0]} to {late[0]} kB"
    )
    environment.expect(
        late[1] <= early[1] + 6, f"connections have grown from {early[1]} to {late[1]}"
    )
