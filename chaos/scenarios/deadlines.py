"""Workers with wrong clocks, which are killed, and jobs that are not worth starting any more."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import null, text, true

from chaos.environment import Environment
from chaos.history import END, START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import AT_ONCE, LOOK_EVERY, is_open, note, queue
from chaos.scenario import Size, scenario
from chaos.workers import Program, Workers
from pgqueue import JobContext, Limit, Retry
from pgqueue.repository import admit, settle
from pgqueue.repository import deadlines as starting
from pgqueue.repository.settle import Attempts
from pgqueue.repository.tables import jobs

CLOCKS = {"ahead": "+3600", "behind": "-3600"}
"""Seconds by which the clocks of workers are wrong."""
SOON = timedelta(milliseconds=200)
HALF_AN_HOUR = timedelta(minutes=30)
PAUSE = timedelta(milliseconds=50)
AT_MOST = timedelta(seconds=1)
MARGIN = timedelta(seconds=0.5)
"""Between two times that one statement takes from the clock, on a machine that does much else."""
LATE = "SELECT count(*) FROM pgqueue.jobs WHERE clock_timestamp() <= run_at + interval '200 ms'"
EXPIRED = """
    SELECT count(*) FROM pgqueue.jobs WHERE outcome = 'cancelled' AND task NOT LIKE '%late%'
"""
TRIED_TOO_LONG = """
    SELECT count(*) FROM (
        SELECT finished_at, min(started_at) OVER job AS began,
               lead(attempt) OVER (job ORDER BY attempt) IS NOT NULL AS was_retried
        FROM pgqueue.job_attempts WHERE outcome = 'failed' WINDOW job AS (PARTITION BY job_id)
    ) AS attempt
    WHERE was_retried AND finished_at + :pause > began + :at_most + :margin
"""
GIVEN_UP_EARLY = """
    SELECT count(*) FROM (
        SELECT max(finished_at) AS ended, min(started_at) AS began
        FROM pgqueue.job_attempts WHERE outcome = 'failed' GROUP BY job_id
    ) AS job
    WHERE ended + :pause < began + :at_most - :margin
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
def in_time(ctx: JobContext, gate: str = "") -> int:
    note(START, ctx)
    while gate and not is_open(gate):
        time.sleep(LOOK_EVERY)
    note(END, ctx)
    return ctx.attempt


@queue.task(retry=Retry.constant(PAUSE).for_at_most(AT_MOST), max_attempts=100)
def give_up(ctx: JobContext) -> None:
    note(START, ctx)
    raise ValueError("planned")


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
    patch.set(starting, "_has_never_started", true)
    patch.rebuild(starting.has_expired)


@mutation
def admissions_forget_when_jobs_were_due(patch: Patch) -> None:
    """The time that a job has waited for a limit does not count."""
    patch.set(admit, "meta_after_admission", lambda *_: jobs.c.meta)
    patch.rebuild(admit.admit)


@mutation
def retries_without_end(patch: Patch) -> None:
    """``for_at_most`` ends no retries."""
    patch.set(settle, "_is_too_late", lambda *_: null())
    patch.rebuild(settle.settle)


@scenario(
    promises="P11",
    research="T29",
    full=Size(jobs=500, workers=8, faults=3),
    short=Size(jobs=20, workers=4, faults=1),
    mutated={
        "deadlines_by_own_clock": "had time left|were started too late",
        "jobs_expire_after_their_start": "had time left",
        "admissions_forget_when_jobs_were_due": "were started too late",
        "retries_without_end": "were retried for too long",
    },
)
def deadlines(environment: Environment, size: Size) -> None:
    """Wrong clocks and kills: what is too late is not started, and the rest is."""
    late = environment.enqueue(too_late, [()] * size.jobs)
    late += environment.enqueue(too_late_by_a_limit, [()] * (size.jobs // 4))
    environment.until(lambda: environment.scalar(LATE) == 0, what="they are too late")
    queues = [f"victim-{number}" for number in range(size.faults)]
    victims = [_victim(environment, name) for name in queues]
    environment.enqueue(in_time, [()] * size.jobs)
    tired = environment.enqueue(give_up, [()] * (size.jobs // 4))
    workers = environment.workers(0, queues=["default", *queues])
    for number in range(size.workers):
        _join(environment, workers, list(CLOCKS)[number % 2])
    environment.until_ended_are(len(late) // 2)
    for victim in victims:
        victim.kill(victim.some())
    environment.open("go")
    environment.until_ended()
    workers.stop()
    _judge(environment, set(late))
    environment.check(succeeded=size.jobs + size.faults, cancelled=len(late), failed=len(tired))


def _victim(environment: Environment, name: str) -> Workers:
    """A worker that runs a job of this queue, whose time is over before the worker is killed."""
    workers = environment.workers(1, concurrency=1, queues=[name])
    [job] = environment.enqueue(in_time.options(queue=name), [("go",)])
    environment.until_started(job)
    environment.execute(
        "UPDATE pgqueue.jobs SET run_at = run_at - interval '1 hour' WHERE id = :id", id=job
    )
    return workers


def _join(environment: Environment, workers: Workers, kind: str) -> None:
    clock = environment.directory / f"clock-{kind}"
    clock.write_text(CLOCKS[kind])
    options = workers.options
    before = (sys.executable, "-m", "chaos.wrong_clock", str(clock))
    name = environment.next_name()
    workers.take(Program(environment, name, environment.url, options, before=before))


def _judge(environment: Environment, late: set[int]) -> None:
    spans = {"pause": PAUSE, "at_most": AT_MOST, "margin": MARGIN}
    started = {event.job for event in environment.history(START)}
    counts = {
        "were started too late": len(late & started),
        "have expired and had time left": environment.scalar(EXPIRED),
        "were retried for too long": environment.scalar(TRIED_TOO_LONG, **spans),
        "were given up too early": environment.scalar(GIVEN_UP_EARLY, **spans),
    }
    wrong = [f"{count} jobs {words}" for words, count in counts.items() if count]
    environment.expect(not wrong, ", ".join(wrong))
