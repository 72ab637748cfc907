"""Behind a pooler, no connection of a client is its own for longer than a transaction."""

from __future__ import annotations

import time

from chaos.chores import AT_A_GATE, call, pay, pay_async, wait, wait_and_pay
from chaos.fleet import Fleet
from chaos.history import START
from chaos.pooler import Pooler
from chaos.proxy import UNPREPARED
from chaos.scenario import Server, Size, scenario
from chaos.stage import Stage
from pgqueue import maintenance

P4 = 35.0
"""Seconds from the death of a worker to the next start of what it ran."""


@scenario(
    promises="P1 P2 P4 P5",
    research="T23",
    full=Size(jobs=3000, workers=2, faults=6, seconds=maintenance.SLOW_GRACE.total_seconds()),
    long=Size(jobs=10_000, workers=4, faults=20, seconds=maintenance.SLOW_GRACE.total_seconds()),
    short=Size(jobs=120, workers=1, faults=1, seconds=2),
    planted={"rescue_loses_the_message": "not within|no worker will ever run it"},
    server=Server.OWN,
    programs=("pgbouncer",),
    alone=True,
)
def behind_a_pooler(stage: Stage, size: Size) -> None:
    """PgBouncer pools transactions and workers are killed: nothing is lost or done twice."""
    direct = stage.url
    stage.queue.notify = False
    with Pooler(stage) as pooler:
        stage.lead_to(pooler.url)
        options = {
            "notify": False,
            "engine": UNPREPARED,
            "slow_grace": size.seconds,
            "alone_for": AT_A_GATE,
        }
        fleets = [
            stage.fleet(mode, size.workers, poll_interval=0.1, **options)
            for mode in ("lease", "transaction")
        ]
        for fleet in fleets:
            fleet.until_registered()
        for task in (pay, pay_async, call):
            stage.enqueue(task.options(max_attempts=1000), [(1,)] * (size.jobs // 3))
        for number in range(size.faults):
            for fleet in fleets:
                fleet.kill(fleet.some())
                fleet.add()
            stage.until_left(size.jobs - size.jobs * (number + 1) // (size.faults + 1))
        _kill_one_that_works(stage, fleets)
        stage.until_ended()
        for fleet in fleets:
            fleet.stop()
        stage.lead_to(direct)
        stage.judge()


def _kill_one_that_works(stage: Stage, fleets: list[Fleet]) -> None:
    """The time in which others take over what a killed worker ran, one of each mode."""
    members = [member for fleet in fleets for member in fleet.members]
    ids = stage.enqueue(wait, [("go",)] * 2 * len(members))
    ids += stage.enqueue(wait_and_pay, [("go",)] * 2 * len(members))
    stage.until_started(*ids)
    killed = [fleet.some() for fleet in fleets]
    theirs = [
        event.job
        for event in stage.history(START)
        if event.job in ids and event.worker in {member.name for member in killed}
    ]
    for fleet, member in zip(fleets, killed, strict=True):
        fleet.kill(member)
        fleet.add()
    began = time.monotonic()
    stage.until_started(*theirs, attempt=2, seconds=P4)
    stage.timed(began)
    stage.open("go")
