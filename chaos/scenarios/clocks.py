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

from chaos.chores import AT_ONCE, EFFECT, call, effect, note, pay, queue, wait
from chaos.fleet import Fleet, Program
from chaos.history import END, START
from chaos.plants import Patch, plant
from chaos.scenario import Size, scenario
from chaos.stage import Stage
from chaos.wrong_clock import PRELOADED
from pgqueue import JobContext, Retry, Snooze, maintenance
from pgqueue.statements import settling

OFFSETS = {"ahead": "+3600", "behind": "-3600"}
"""Seconds."""
STEPPING = "stepping"
"""A clock that is set from the one to the other, again and again."""
FAST = {"fast": "+0 x2"}
"""At twice the speed."""
KINDS = (*OFFSETS, STEPPING, *FAST)
MODES = ("lease", "transaction")
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


@plant
def rescuer_compares_clocks(patch: Patch) -> None:
    """A rescuer compares its own clock with ``heartbeat_at``."""

    def dead_among(_self: Any, members: list[Any], **_times: float) -> list[Any]:
        oldest = datetime.now(UTC) - maintenance.SLOW_GRACE
        return [member for member in members if member.heartbeat_at < oldest]

    patch.set(maintenance.Witness, "dead_among", dead_among)


@plant
def settles_by_its_own_clock(patch: Patch) -> None:
    """The time of the next attempt, and that of the end, are those of the worker's clock."""

    def own_clock() -> Any:
        return bindparam(None, callable_=lambda: datetime.now(UTC), unique=True)

    patch.set(settling, "clock", own_clock)
    patch.rebuild(*(one for one in vars(settling).values() if hasattr(one, "cache_clear")))


PLANTED = {
    "rescuer_compares_clocks": "were declared dead, . were killed",
    "settles_by_its_own_clock": "outside .* of the server",
}
FULL = Size(jobs=2500, workers=8, faults=3)
LONG = Size(jobs=5000, workers=8, faults=6)
SHORT = Size(jobs=60, workers=4, faults=1)


@scenario(promises="P4 P11", research="T29", full=FULL, long=LONG, short=SHORT, planted=PLANTED)
def wrong_clocks(stage: Stage, size: Size) -> None:
    """Clocks an hour ahead or behind, set to and fro, or too fast: all is as if they were right."""
    _work_by_wrong_clocks(stage, size, _in_python)


@scenario(
    promises="P4 P11",
    research="T29",
    full=FULL,
    long=LONG,
    short=SHORT,
    planted=PLANTED,
    programs=("linux", "faketime"),
)
def wrong_clocks_of_processes(stage: Stage, size: Size) -> None:
    """The same with clocks that are wrong for the libraries in C as well."""
    _work_by_wrong_clocks(stage, size, _in_the_whole_process)


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
    stage: Stage, size: Size, before: Callable[[Path], tuple[str, ...]]
) -> None:
    began = stage.scalar("SELECT clock_timestamp()")
    victims = [_victim(stage) for _ in range(size.faults)]
    fleet = stage.fleet("lease", 0)
    for number in range(size.workers):
        kind, mode = KINDS[number % len(KINDS)], MODES[(number + number // len(KINDS)) % 2]
        _join(stage, fleet, mode, before(_clock(stage, kind)))
    with _set_to_and_fro(stage):
        stage.until(partial(_have_come, stage, fleet), what="all workers are registered")
        total = _enqueue(stage, size)
        stage.until(partial(_are_left, stage, total - size.jobs // 3), what="they work")
        for victim in victims:
            victim.kill(victim.some())
        stage.open("go")
        stage.until(partial(_are_left, stage, 0), what="all jobs end")
        fleet.stop()
    _times_are_of_the_server(stage, began)
    stage.judge(succeeded=total)
    stage.expect(stage.counts["second starts"] == size.faults, "not each victim was rescued")


def _have_come(stage: Stage, fleet: Fleet) -> bool:
    come = {row[0] for row in stage.rows("SELECT pid FROM pgqueue.workers")}
    _expect_nobody_misled(stage)
    return come >= {member.pid for member in fleet.members}


def _are_left(stage: Stage, count: int) -> bool:
    _expect_nobody_misled(stage)
    return stage.unfinished() <= count


def _expect_nobody_misled(stage: Stage) -> None:
    dead = stage.scalar("SELECT count(*) FROM pgqueue.workers WHERE dead_at IS NOT NULL")
    kills = stage.counts["kills"]
    stage.expect(dead <= kills, f"{dead} workers were declared dead, {kills} were killed")
    late = stage.scalar(
        "SELECT count(*) FROM pgqueue.message_queue"
        " WHERE run_at > clock_timestamp() + interval '1 minute'"
    )
    stage.expect(late == 0, f"{late} jobs wait for a time outside that of the server")


def _clock(stage: Stage, kind: str) -> Path:
    file = stage.directory / f"clock-{kind}"
    if not file.exists():  # or another worker would find it empty for a moment
        file.write_text({**OFFSETS, **FAST}.get(kind, "+0"))
    return file


def _join(stage: Stage, fleet: Fleet, mode: str, before: tuple[str, ...]) -> None:
    options = {**fleet.options, "mode": mode}
    fleet.take(Program(stage, stage.next_name(), stage.url, options, before=before))


def _victim(stage: Stage) -> Fleet:
    """A worker that holds a job until it is killed: one whose jobs have to be rescued."""
    [job] = stage.enqueue(wait, [("go",)])
    fleet = stage.fleet("lease", 1, concurrency=1)
    stage.until_started(job)
    return fleet


def _enqueue(stage: Stage, size: Size) -> int:
    share = size.jobs // 5
    for task in (pay, fail_once_and_pay, call.options(delay=LATER)):
        stage.enqueue(task, [()] * share)
    soon = stage.scalar("SELECT clock_timestamp()") + LATER
    stage.enqueue(pay.options(run_at=soon), [()] * share)
    stage.enqueue(snooze_and_follow, [()] * share)
    return len(stage.acknowledged) + share


@contextmanager
def _set_to_and_fro(stage: Stage) -> Iterator[None]:
    """Set the clocks that are set an hour forth and back, until the block ends."""
    ended = Event()
    new = stage.directory / "clock-new"

    def work() -> None:
        while not ended.wait(SET_EVERY):
            new.write_text(list(OFFSETS.values())[stage.counts["clocks set"] % len(OFFSETS)])
            new.rename(stage.directory / f"clock-{STEPPING}")
            stage.count("clocks set")

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


def _times_are_of_the_server(stage: Stage, began: datetime) -> None:
    for table, columns in TIMES.items():
        for name in columns:
            outside = stage.scalar(
                f"SELECT count(*) FROM pgqueue.{table}"
                f" WHERE {name} NOT BETWEEN :began AND clock_timestamp()",
                began=began,
            )
            words = f"{outside} times {table}.{name} are outside the time of the server"
            stage.expect(outside == 0, words)
    early = stage.scalar("SELECT count(*) FROM pgqueue.jobs WHERE started_at < run_at")
    stage.expect(early == 0, f"{early} jobs have started before their time")
