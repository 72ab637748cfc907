"""Workers whose clocks are wrong, and are set while they work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

from sqlalchemy import bindparam, null, text, true
from sqlalchemy.orm import Session

from chaos.environment import Environment
from chaos.history import END, START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import (
    AT_ONCE,
    EFFECT,
    attend,
    call,
    effect,
    note,
    pay,
    queue,
    until_open,
)
from chaos.scenario import Size, scenario
from chaos.workers import Workers
from pgqueue import JobContext, Limit, Retry, Snooze
from pgqueue.repository import deadlines, settle
from pgqueue.repository.settle import Attempts
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
SOON = timedelta(milliseconds=200)
HALF_AN_HOUR = timedelta(minutes=30)
BRIEF_PAUSE = timedelta(milliseconds=50)
AT_MOST = timedelta(seconds=1)
MARGIN = timedelta(seconds=0.5)
"""Between two times that one statement takes from the clock, on a machine that does much else."""
LATE = "SELECT count(*) FROM pgqueue.jobs WHERE clock_timestamp() <= run_at + interval '200 ms'"
MOVED = "UPDATE pgqueue.jobs SET run_at = run_at - interval '1 hour' WHERE id = :id"
MOVED_BACK = "UPDATE pgqueue.jobs SET run_at = created_at WHERE task = :task"
EXPIRED = """
    SELECT count(*) FROM pgqueue.jobs WHERE outcome = 'cancelled' AND task NOT LIKE '%late%'
"""
TRIED = """
    SELECT finished_at, min(started_at) OVER job AS began,
           lead(attempt) OVER (job ORDER BY attempt) IS NOT NULL AS was_retried
    FROM pgqueue.job_attempts
    WHERE job_id IN (SELECT id FROM pgqueue.jobs WHERE outcome = 'failed')
    WINDOW job AS (PARTITION BY job_id)
"""
TRIED_TOO_LONG = f"""
    SELECT count(*) FROM ({TRIED}) AS attempt
    WHERE was_retried AND finished_at + :pause > began + :at_most + :margin
"""
GIVEN_UP_EARLY = f"""
    SELECT count(*) FROM ({TRIED}) AS attempt
    WHERE NOT was_retried AND finished_at + :pause < began + :at_most - :margin
"""


@queue.task(retry=AT_ONCE, expires_in=SOON)
def too_late(ctx: JobContext) -> int:
    note(START, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE, expires_in=SOON, limit=Limit(1))
def too_late_by_a_limit(ctx: JobContext) -> int:
    """Its ``run_at`` is that of its admission when a worker looks at it."""
    note(START, ctx)
    return ctx.attempt


@queue.task(retry=AT_ONCE, expires_in=HALF_AN_HOUR)
def due_in_time(ctx: JobContext, gate: str = "") -> int:
    return attend(ctx, lambda: until_open(gate) if gate else None)


@queue.task(retry=Retry.constant(BRIEF_PAUSE).for_at_most(AT_MOST), max_attempts=100)
def give_up(ctx: JobContext) -> None:
    note(START, ctx)
    raise ValueError("planned")


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


@mutation
def deadlines_by_own_clock(patch: Patch) -> None:
    """Whether a job has expired is decided by the worker's clock."""

    def has_expired(self: Any, claimed: Any, expires_in: timedelta) -> bool:
        due = text("SELECT run_at FROM pgqueue.jobs WHERE id = :id")
        run_at = self._executor.execute(due, {"id": claimed.job_id}).scalar_one()
        return bool(claimed.attempt == 1 and datetime.now(UTC) > run_at + expires_in)

    patch.set(Attempts, "has_expired", has_expired)


@mutation
def jobs_expire_after_their_start(patch: Patch) -> None:
    """A job that has started before, and whose worker was killed, expires."""
    patch.set(deadlines, "_has_never_started", true)
    patch.rebuild(deadlines.has_expired)


@mutation
def retries_without_end(patch: Patch) -> None:
    """``for_at_most`` ends no retries."""
    patch.set(settle, "_is_too_late", lambda *_: null())
    patch.rebuild(settle.settle)


@scenario(
    promises="P4 P11",
    full=Size(jobs=2500, workers=8, faults=3),
    long=Size(jobs=5000, workers=8, faults=6),
    short=Size(jobs=100, workers=4, faults=1),
    mutated={
        "rescuer_compares_clocks": "were declared dead, . were killed",
        "settles_by_its_own_clock": "outside .* of the server",
        "deadlines_by_own_clock": "had time left|were started too late",
        "jobs_expire_after_their_start": "had time left",
        "retries_without_end": "were retried for too long",
    },
)
def wrong_clocks(environment: Environment, size: Size) -> None:
    """Clocks an hour off, set to and fro, too fast: jobs start in time, and not if it is over."""
    began = environment.scalar("SELECT clock_timestamp()")
    late = environment.enqueue(too_late, [()] * (size.jobs // 5))
    late += environment.enqueue(too_late_by_a_limit, [()] * (size.jobs // 20))
    environment.until(lambda: environment.scalar(LATE) == 0, what="they are too late")
    queues = [f"victim-{number}" for number in range(size.faults)]
    victims = [_victim(environment, name) for name in queues]
    workers = environment.workers(0, queues=["default", *queues])
    for number in range(size.workers):
        kind = KINDS[number % len(KINDS)]
        workers.add_with_clock(kind, {**OFFSETS, **FAST}.get(kind, "+0"))
    with _set_to_and_fro(environment):
        environment.until(
            partial(_have_come, environment, workers), what="all workers are registered"
        )
        in_time = _enqueue(environment, size.jobs)
        tired = environment.enqueue(give_up, [()] * (size.jobs // 20))
        environment.until(partial(_are_left, environment, in_time // 2), what="they work")
        for victim in victims:
            victim.kill(victim.some())
        environment.open("go")
        environment.until(partial(_are_left, environment, 0), what="all jobs end")
        workers.stop()
    environment.execute(MOVED_BACK, task=due_in_time.name)
    _times_are_of_the_server(environment, began)
    _nothing_ran_too_late(environment, set(late))
    environment.judge(succeeded=in_time + size.faults, cancelled=len(late), failed=len(tired))
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


def _victim(environment: Environment, name: str) -> Workers:
    """A worker that runs a job whose deadline passes before the worker is killed."""
    workers = environment.workers(1, concurrency=1, queues=[name])
    [job] = environment.enqueue(due_in_time.options(queue=name), [("go",)])
    environment.until_started(job)
    environment.execute(MOVED, id=job)
    return workers


def _enqueue(environment: Environment, count: int) -> int:
    """How many jobs will succeed: those of the last task enqueue others."""
    share = count // 5
    for task in (pay, fail_once_and_pay, call.options(delay=LATER), due_in_time):
        environment.enqueue(task, [()] * share)
    soon = environment.scalar("SELECT clock_timestamp()") + LATER
    environment.enqueue(pay.options(run_at=soon), [()] * share)
    environment.enqueue(snooze_and_follow, [()] * share)
    return 7 * share


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


def _nothing_ran_too_late(environment: Environment, late: set[int]) -> None:
    spans = {"pause": BRIEF_PAUSE, "at_most": AT_MOST, "margin": MARGIN}
    started = {event.job for event in environment.history(START)}
    counts = {
        "were started too late": len(late & started),
        "have expired and had time left": environment.scalar(EXPIRED),
        "were retried for too long": environment.scalar(TRIED_TOO_LONG, **spans),
        "were given up too early": environment.scalar(GIVEN_UP_EARLY, **spans),
    }
    wrong = [f"{count} jobs {words}" for words, count in counts.items() if count]
    environment.expect(not wrong, ", ".join(wrong))
