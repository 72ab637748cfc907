"""Processes that fork after they have spoken to the database."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import attend, queue, until_open
from chaos.scenario import Size, scenario
from chaos.workers import Member, Program
from pgqueue import JobContext, PgQueue

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
def connections_are_inherited(patch: Patch) -> None:
    """A PgQueue does not notice that it is in another process than before."""

    def engine(self):  # type: ignore[no-untyped-def]
        return self.sessions.kw["bind"]

    patch.set(PgQueue, "engine", property(engine))


@scenario(
    promises="P1",
    research="T30",
    full=Size(jobs=20, workers=20),
    short=Size(jobs=3, workers=3),
    mutated={"connections_are_inherited": "speak to the same server process"},
    programs=("linux",),
)
def forks_in_the_middle(environment: Environment, size: Size) -> None:
    """fork, spawn and forkserver in the middle of work: no two processes share a connection."""
    log = environment.directory / "forking.log"
    variables = {
        "CHAOS_URL": environment.url,
        "CHAOS_DIRECTORY": str(environment.directory),
        "CHAOS_WORKER": "parent",
        "CHAOS_PLANT": environment.mutation or "",
    }
    with log.open("wb") as output:
        program = subprocess.Popen(
            [sys.executable, "-m", "chaos.forking", str(size.workers), str(size.jobs)],
            env={**os.environ, **variables},
            cwd=Path(__file__).parent.parent.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        environment.until(
            lambda: _nobody_shares(environment) and program.poll() is not None,
            what="all processes end",
        )
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)  # and its children
            program.wait()
    environment.expect(program.returncode == 0, f"the program failed:\n{log.read_text()[-2000:]}")
    codes = json.loads((environment.directory / "codes").read_text())
    environment.expect(
        set(codes) == {0}, f"children ended with {codes}:\n{log.read_text()[-2000:]}"
    )
    environment.count("forks", size.workers)
    _collect(environment)
    workers = environment.workers(1)  # what was enqueued after the last child was done
    environment.finish(workers)
    environment.check()


@scenario(
    promises="P4",
    research="T30",
    full=Size(jobs=20, faults=5),
    short=Size(jobs=4, faults=1),
    mutated={"orphans_keep_the_sockets": "not within .* s: .* claimable"},
    programs=("linux",),
)
def orphans_of_a_killed_worker(environment: Environment, size: Size) -> None:
    """kill -9 of a worker whose handlers have forked: its orphans do not hold up the rescue."""
    for number in range(size.faults):
        count = size.jobs // size.faults
        jobs = environment.enqueue(leave_an_orphan, [(f"go{number}",)] * count)
        # A program: of a process that multiprocessing has forked, the orphans hide the end.
        options = {"concurrency": count}
        victim = Program(environment, environment.next_name(), environment.url, options)
        environment.members.append(victim)
        environment.until_started(*jobs)
        watcher = environment.workers(1, concurrency=count)
        watcher.until_registered()
        environment.kill(victim)
        holds_none = partial(_holds_none, environment, victim)
        environment.until(holds_none, seconds=5, what="its jobs are claimable")
        environment.open(f"go{number}")
        environment.finish(watcher)
    environment.check()


def _holds_none(environment: Environment, member: Member) -> bool:
    return environment.leases_of(member) == 0


def _nobody_shares(environment: Environment) -> bool:
    owner: dict[int, str] = {}
    for file in environment.directory.glob("backends-*"):
        for line in file.read_text().splitlines():
            [backend] = json.loads(line)
            first = owner.setdefault(backend, file.name)
            words = f"{first} and {file.name} speak to the same server process {backend}"
            environment.expect(first == file.name, words)
    return True


def _collect(environment: Environment) -> None:
    for file in environment.directory.glob("acknowledged-*"):
        for line in file.read_text().splitlines():
            environment.acknowledged.update(json.loads(line))
    environment.count("jobs", len(environment.acknowledged))
