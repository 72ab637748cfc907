"""Workers whose clocks are wrong, and are set while they work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

from sqlalchemy import bindparam
from sqlalchemy.orm import Session

from chaos.environment import Environment
from chaos.history import END, START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import AT_ONCE, EFFECT, call, effect, note, pay, queue, wait
from chaos.scenario import Size, scenario
from chaos.workers import Program, Workers
from chaos.wrong_clock import PRELOADED
from pgqueue import JobContext, Retry, Snooze
from pgqueue.repository import settle
from pgqueue.worker import liveness

OFFSETS = {"ahead": "+3600", "behind": "-3600"}
"""Seconds."""
STEPPING = "stepping"
"""A clock that is set from the one to the other, again and again."""
FAST = {"fast": "+0 x2"}
"""At twice the speed."""
KINDS = (*OFFSETS, STEPPING, *FAST)
SET_EVERY = 0.3
LATER = timedelta(seconds=0.5)
PAUSE = timedelta(seconds=0.3)


@queue.task(retry=Retry.constant(PAUSE))
def fail_once_and_pay(session: Session, ctx: JobContext) -> int:
    """Its second attempt comes by the time that the settle of the first has written."""
    note(START, ctx)
    session.execute(EFFECT, effect(ctx))
    if ctx.attempt == 1:
        raise ValueError("planned")
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE)
def snooze_and_follow(ctx: JobContext) -> int | Snooze:
    """Enqueues with a delay from a process whose clock is wrong."""
    if not _has_snoozed(ctx):
        note("snooze", ctx)
        return Snooze(PAUSE)
    note(START, ctx)
    call.options(delay=LATER).delay()
    note(END, ctx)
    return ctx.attempt


def _has_snoozed(ctx: JobContext) -> bool:
    mark = Path(os.environ["CHAOS_DIRECTORY"]) / f"snoozed-{ctx.job_id}"
    if mark.exists():
        return True
    mark.touch()
    return False


@mutation
def rescuer_compares_clocks(patch: Patch) -> None:
    """A rescuer compares its own clock with ``heartbeat_at``."""

    def dead_among(_self: Any, members: list[Any], **_times: float) -> list[Any]:
        oldest = datetime.now(UTC) - liveness.SLOW_GRACE
        return [member for member in members if member.heartbeat_at < oldest]

    patch.set(liveness.Witness, "dead_among", dead_among)


@mutation
def settles_by_its_own_clock(patch: Patch) -> None:
    """The time of the next attempt, and that of the end, are those of the worker's clock."""

    def own_clock() -> Any:
        return bindparam(None, callable_=lambda: datetime.now(UTC), unique=True)

    patch.set(settle, "clock", own_clock)
    patch.rebuild(*(one for one in vars(settle).values() if hasattr(one, "cache_clear")))


PLANTED = {
    "rescuer_compares_clocks": "were declared dead, . were killed",
    "settles_by_its_own_clock": "outside .* of the server",
}
FULL = Size(jobs=2500, workers=8, faults=3)
LONG = Size(jobs=5000, workers=8, faults=6)
SHORT = Size(jobs=60, workers=4, faults=1)


@scenario(promises="P4 P11", research="T29", full=FULL, long=LONG, short=SHORT, mutated=PLANTED)
def wrong_clocks(environment: Environment, size: Size) -> None:
    """Clocks an hour ahead or behind, set to and fro, or too fast: all is as if they were right."""
    _work_by_wrong_clocks(environment, size, _in_python)


@scenario(
    promises="P4 P11",
    research="T29",
    full=FULL,
    long=LONG,
    short=SHORT,
    mutated=PLANTED,
    programs=("linux", "faketime"),
)
def wrong_clocks_of_processes(environment: Environment, size: Size) -> None:
    """The same with clocks that are wrong for the libraries in C as well."""
    _work_by_wrong_clocks(environment, size, _in_the_whole_process)


def _in_python(file: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "chaos.wrong_clock", str(file))


def _in_the_whole_process(file: Path) -> tuple[str, ...]:
    settings = {
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    # The program itself waits for what it starts, and would get the signals.
    library = subprocess.check_output(["faketime", "-m", "-f", "+0", "printenv", "LD_PRELOAD"])
    settings["LD_PRELOAD"] = library.decode().strip()
    said = [f"{name}={value}" for name, value in settings.items()]
    return ("env", *said, sys.executable, "-m", "chaos.wrong_clock", PRELOADED)


def _work_by_wrong_clocks(
    environment: Environment, size: Size, before: Callable[[Path], tuple[str, ...]]
) -> None:
    began = environment.scalar("SELECT clock_timestamp()")
    victims = [_victim(environment) for _ in range(size.faults)]
    workers = environment.workers(0)
    for number in range(size.workers):
        kind = KINDS[number % len(KINDS)]
        _join(environment, workers, before(_clock(environment, kind)))
    with _set_to_and_fro(environment):
        environment.until(
            partial(_have_come, environment, workers), what="all workers are registered"
        )
        total = _enqueue(environment, size)
        environment.until(partial(_are_left, environment, total - size.jobs // 3), what="they work")
        for victim in victims:
            victim.kill(victim.some())
        environment.open("go")
        environment.until(partial(_are_left, environment, 0), what="all jobs end")
        workers.stop()
    _times_are_of_the_server(environment, began)
    environment.check(succeeded=total)
    environment.expect(
        environment.counts["second starts"] == size.faults, "not each victim was rescued"
    )


def _have_come(environment: Environment, workers: Workers) -> bool:
    come = {row[0] for row in environment.rows("SELECT pid FROM pgqueue.workers")}
    _expect_nobody_misled(environment)
    return come >= {member.pid for member in workers.members}


def _are_left(environment: Environment, count: int) -> bool:
    _expect_nobody_misled(environment)
    return environment.unfinished() <= count


def _expect_nobody_misled(environment: Environment) -> None:
    dead = environment.scalar("SELECT count(*) FROM pgqueue.workers WHERE dead_at IS NOT NULL")
    kills = environment.counts["kills"]
    environment.expect(dead <= kills, f"{dead} workers were declared dead, {kills} were killed")
    late = environment.scalar(
        "SELECT count(*) FROM pgqueue.message_queue"
        " WHERE run_at > clock_timestamp() + interval '1 minute'"
    )
    environment.expect(late == 0, f"{late} jobs wait for a time outside that of the server")


def _clock(environment: Environment, kind: str) -> Path:
    file = environment.directory / f"clock-{kind}"
    if not file.exists():  # or another worker would find it empty for a moment
        file.write_text({**OFFSETS, **FAST}.get(kind, "+0"))
    return file


def _join(environment: Environment, workers: Workers, before: tuple[str, ...]) -> None:
    options = workers.options
    workers.take(
        Program(environment, environment.next_name(), environment.url, options, before=before)
    )


def _victim(environment: Environment) -> Workers:
    """A worker that holds a job until it is killed: one whose jobs have to be rescued."""
    [job] = environment.enqueue(wait, [("go",)])
    workers = environment.workers(1, concurrency=1)
    environment.until_started(job)
    return workers


def _enqueue(environment: Environment, size: Size) -> int:
    share = size.jobs // 5
    for task in (pay, fail_once_and_pay, call.options(delay=LATER)):
        environment.enqueue(task, [()] * share)
    soon = environment.scalar("SELECT clock_timestamp()") + LATER
    environment.enqueue(pay.options(run_at=soon), [()] * share)
    environment.enqueue(snooze_and_follow, [()] * share)
    return len(environment.acknowledged) + share


@contextmanager
def _set_to_and_fro(environment: Environment) -> Iterator[None]:
    """Set the clocks that are set an hour forth and back, until the block ends."""
    ended = Event()
    new = environment.directory / "clock-new"

    def work() -> None:
        while not ended.wait(SET_EVERY):
            new.write_text(list(OFFSETS.values())[environment.counts["clocks set"] % len(OFFSETS)])
            new.rename(environment.directory / f"clock-{STEPPING}")
            environment.count("clocks set")

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


TIMES = {
    "jobs": ("created_at", "run_at", "started_at", "finished_at"),
    "job_attempts": ("started_at", "finished_at"),
    "workers": ("started_at", "heartbeat_at", "dead_at"),
}


def _times_are_of_the_server(environment: Environment, began: datetime) -> None:
    for table, columns in TIMES.items():
        for name in columns:
            outside = environment.scalar(
                f"SELECT count(*) FROM pgqueue.{table}"
                f" WHERE {name} NOT BETWEEN :began AND clock_timestamp()",
                began=began,
            )
            words = f"{outside} times {table}.{name} are outside the time of the server"
            environment.expect(outside == 0, words)
    early = environment.scalar("SELECT count(*) FROM pgqueue.jobs WHERE started_at < run_at")
    environment.expect(early == 0, f"{early} jobs have started before their time")
