"""A worker is killed, and the processes that its handlers have forked live on."""

from __future__ import annotations

import os
import time
from functools import partial

from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import attend, queue, until_open
from chaos.scenario import Size, scenario
from chaos.workers import Member
from pgqueue import JobContext
from pgqueue.worker import liveness

ORPHAN_LIVES = 15.0
"""Seconds; an orphan that nobody ends keeps what it has inherited for so long."""


@queue.task
def leave_an_orphan(ctx: JobContext, gate: str) -> int:
    """Forks a child that outlives this process, at its first attempt."""
    if ctx.attempt == 1:
        _fork_a_child()
    return attend(ctx, lambda: until_open(gate))


def _fork_a_child() -> None:
    """As multiprocessing does; not by it, which refuses in a process that it has forked itself."""
    if os.fork() == 0:
        time.sleep(ORPHAN_LIVES)
        os._exit(0)


@mutation
def orphans_keep_the_sockets(patch: Patch) -> None:
    """A forked child keeps the sockets of the worker's connections open."""
    from pgqueue.database import opening

    patch.set(opening, "keep_from_children", lambda _driver: None)


@mutation
def death_is_noticed_late(patch: Patch) -> None:
    """The grace of a worker whose connection is gone is as long as that of a frozen one."""
    patch.set(liveness, "FAST_GRACE", liveness.SLOW_GRACE)


@scenario(
    promises="P4",
    full=Size(jobs=100, faults=10),
    short=Size(jobs=10, faults=1),
    mutated=dict.fromkeys(
        ("orphans_keep_the_sockets", "death_is_noticed_late"), "claimable again after|not within"
    ),
    programs=("linux",),
)
def recovery_after_a_kill(environment: Environment, size: Size) -> None:
    """kill -9 of a worker whose handlers have forked: its jobs are claimable within two seconds."""
    slots = size.jobs // size.faults // 2
    options = {"concurrency": slots, "poll_interval": 0.1}
    for number in range(size.faults):
        # It holds as many again, which do not run.
        jobs = environment.enqueue(leave_an_orphan, [(f"go{number}",)] * (2 * slots))
        # A program: of a process that multiprocessing has forked, the orphans hide the end.
        victim = environment.workers(0, **options).add_program()
        environment.until_started(*jobs[:slots])
        watcher = environment.workers(1, **options)
        watcher.until_registered()
        environment.kill(victim)
        began = time.monotonic()
        holds_none = partial(_holds_none, environment, victim)
        environment.until(holds_none, seconds=5, what="its jobs are claimable")
        took = time.monotonic() - began
        environment.expect(
            took <= 2, f"its jobs are claimable again after {took:.2f} s, promised are 2"
        )
        environment.open(f"go{number}")
        environment.finish(watcher)
    environment.judge()


def _holds_none(environment: Environment, member: Member) -> bool:
    return environment.leases_of(member) == 0
