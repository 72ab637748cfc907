"""Workers that die, lose connections and have wrong clocks while they fire schedules."""

from __future__ import annotations

import os
import signal
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from chaos.environment import Environment
from chaos.history import END, START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import AT_ONCE, EFFECT, effect, note, queue, worker_name
from chaos.scenario import Size, scenario
from chaos.workers import Workers
from pgqueue import JobContext
from pgqueue.repository import schedules as statements
from pgqueue.repository.schedules import Moved, ScheduleRows
from pgqueue.rules.ticks import decide
from pgqueue.worker.duties import ticks

SECOND = timedelta(seconds=1)
CLOCKS = {"ahead": "+3600", "behind": "-3600"}
"""Seconds by which the clocks of two workers are wrong."""

TICKS = """
    SELECT meta->'schedule'->>'name' AS name,
           CAST(meta->'schedule'->>'tick' AS timestamptz) AS tick, created_at
    FROM pgqueue.jobs
"""
TWICE = f"""
    SELECT count(*) FROM (SELECT FROM ({TICKS}) AS t GROUP BY name, tick HAVING count(*) > 1) AS x
"""
EARLY = f"SELECT count(*) FROM ({TICKS}) AS t WHERE tick > created_at"
MISSING = f"""
    SELECT sum(extract(epoch FROM last_tick_at - CAST(:began AS timestamptz)) + 1)
           - (SELECT count(*) FROM (SELECT DISTINCT name, tick FROM ({TICKS}) AS t) AS x)
    FROM pgqueue.schedules
"""
TERMINATED = """
    SELECT count(*) FROM pg_stat_activity, pg_terminate_backend(pid)
    WHERE datname = current_database() AND application_name LIKE '% timers'
"""


def _die_if_told() -> None:
    """kill -9 while the job of a tick is prepared, if the scenario has asked for one."""
    mark = Path(os.environ["CHAOS_DIRECTORY"]) / "die"
    if worker_name() == "scenario":
        return
    try:
        mark.rename(mark.with_name(f"died-{os.getpid()}"))
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


@queue.task(retry=AT_ONCE, unique_key=_die_if_told)
def pay_at_tick(session: Session, ctx: JobContext) -> int:
    """Its unique key, None, is asked for while its tick is being fired."""
    note(START, ctx)
    session.execute(EFFECT, effect(ctx))
    note(END, ctx)
    return ctx.attempt


@mutation
def ticks_without_lock(patch: Patch) -> None:
    """The schedules are read again and not locked."""
    locking: Any = statements.lock_schedules()
    unlocked = locking._generate()
    unlocked._for_update_arg = None
    patch.set(statements, "lock_schedules", lambda: unlocked)


@mutation
def ticks_apart_from_their_jobs(patch: Patch) -> None:
    """A schedule is moved in a separate transaction, a while before its jobs are enqueued."""

    def apart(_ticks: Any, connection: Any, ready: Any) -> None:
        rows = ScheduleRows(connection)
        with connection.begin():
            locked = rows.lock(each.due.state.name for each in ready)
            found = [(each, locked.get(each.due.state.name)) for each in ready]
            ready = [each for each, now in found if now and each.due.is_same(now)]
            rows.move([Moved(each.due.state.name, each.firing, None) for each in ready])
        time.sleep(0.2)  # kills and lost connections follow a move, and find this
        with connection.begin():  # the fault
            for each in ready:
                for job in each.jobs:
                    each.task.enqueue_prepared(connection, job)

    patch.set(ticks.Ticks, "_fire_all", apart)


@mutation
def ticks_by_own_clock(patch: Patch) -> None:
    """What is due is decided by the worker's clock."""
    patch.set(
        ticks, "decide", lambda rule, standing, _now: decide(rule, standing, datetime.now(UTC))
    )


@scenario(
    promises="P9 P11",
    full=Size(jobs=40, workers=8, faults=90),
    short=Size(jobs=8, workers=4, faults=9),
    mutated={
        "ticks_without_lock": "ticks have two jobs",
        "ticks_apart_from_their_jobs": "ticks have (no job|two jobs)",
        "ticks_by_own_clock": "ticks have no job|before their time",
    },
)
def ticks_of_schedules(environment: Environment, size: Size) -> None:
    """kill -9 amid ticks, lost connections, wrong clocks: each tick has one job, and no more."""
    began = _add_schedules(environment, size.jobs)
    workers = environment.workers(0)
    for kind, offset in CLOCKS.items():
        workers.add_with_clock(kind, offset)
        _until_fired_on(environment)  # the first does it alone, the second with the first
    while len(workers.members) < size.workers:
        workers.add()
    for number in range(size.faults):
        _until_fired_on(environment)
        (_die_amid_a_tick, _kill_some, _terminate)[number % 3](environment, workers)
    _until_fired_on(environment)
    _until_fired_on(environment)
    with environment.queue.session() as session, session.begin():
        for number in range(size.jobs):
            environment.queue.schedules.pause(session, f"s{number}")
    environment.finish(workers)
    _each_tick_has_one_job(environment, began)
    total = environment.scalar("SELECT count(*) FROM pgqueue.jobs")
    environment.count("jobs", total)
    environment.judge(succeeded=total)


def _add_schedules(environment: Environment, number: int) -> datetime:
    with environment.queue.session() as session, session.begin():
        for each in range(number):
            environment.queue.schedules.add(
                session, pay_at_tick, every=SECOND, name=f"s{each}", catch_up=1000
            )
    first: datetime = environment.scalar("SELECT max(next_at) FROM pgqueue.schedules")
    # All begin at the same tick, so that the ticks can be counted.
    environment.execute("UPDATE pgqueue.schedules SET next_at = :first", first=first)
    return first


def _until_fired_on(environment: Environment) -> None:
    """Wait until every schedule has fired a tick that is due from now on."""
    now = environment.scalar("SELECT clock_timestamp()")
    behind = "SELECT count(*) FROM pgqueue.schedules WHERE coalesce(last_tick_at, 'epoch') < :now"
    environment.until(
        partial(_is_zero, environment, behind, now), what="every schedule has fired its next tick"
    )
    early = environment.scalar(EARLY)
    environment.expect(early == 0, f"{early} ticks were fired before their time")


def _is_zero(environment: Environment, statement: str, now: datetime) -> bool:
    return bool(environment.scalar(statement, now=now) == 0)


def _die_amid_a_tick(environment: Environment, workers: Workers) -> None:
    mark = environment.directory / "die"
    mark.touch()
    environment.until(lambda: not mark.exists(), what="a worker fires a tick, and dies of it")
    environment.until(workers.replace_ended, what="it has ended")
    environment.count("deaths")


def _kill_some(_environment: Environment, workers: Workers) -> None:
    workers.kill_one()


def _terminate(environment: Environment, workers: Workers) -> None:
    environment.count("terminated connections", environment.scalar(TERMINATED))


def _each_tick_has_one_job(environment: Environment, began: datetime) -> None:
    counts = {
        "ticks have two jobs": environment.scalar(TWICE),
        "ticks have no job": environment.scalar(MISSING, began=began),
    }
    wrong = [f"{count} {words}" for words, count in counts.items() if count]
    environment.expect(not wrong, ", ".join(wrong))
