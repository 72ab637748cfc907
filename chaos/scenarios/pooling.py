"""Behind a pooler, no connection of a client is its own for longer than a transaction."""

from __future__ import annotations

import time

from chaos.environment import Environment
from chaos.history import START
from chaos.pooler import Pooler
from chaos.proxy import UNPREPARED
from chaos.sample_tasks import AT_A_GATE, call, pay, pay_async, wait, wait_and_pay
from chaos.scenario import Server, Size, scenario
from chaos.workers import Workers
from pgqueue.worker import liveness

P4 = 35.0
"""Seconds from the death of a worker to the next start of what it ran."""


@scenario(
    promises="P1 P2 P4 P5",
    full=Size(jobs=3000, workers=2, faults=6, seconds=liveness.SLOW_GRACE.total_seconds()),
    long=Size(jobs=10_000, workers=4, faults=20, seconds=liveness.SLOW_GRACE.total_seconds()),
    short=Size(jobs=120, workers=1, faults=1, seconds=2),
    mutated={"rescue_loses_the_message": "not within|no worker will ever run it"},
    server=Server.OWN,
    programs=("pgbouncer",),
    alone=True,
)
def behind_a_pooler(environment: Environment, size: Size) -> None:
    """PgBouncer pools transactions and workers are killed: nothing is lost or done twice."""
    direct = environment.url
    environment.queue.notify = False
    with Pooler(environment) as pooler:
        environment.lead_to(pooler.url)
        options = {
            "notify": False,
            "engine": UNPREPARED,
            "slow_grace": size.seconds,
            "alone_for": AT_A_GATE,
        }
        workers = environment.workers(2 * size.workers, poll_interval=0.1, **options)
        workers.until_registered()
        for task in (pay, pay_async, call):
            environment.enqueue(task.options(max_attempts=1000), [(1,)] * (size.jobs // 3))
        for number in range(size.faults):
            for _ in range(2):
                workers.kill_one()
            environment.until_left(size.jobs - size.jobs * (number + 1) // (size.faults + 1))
        _kill_one_that_works(environment, workers)
        environment.finish(workers)
        environment.lead_to(direct)
        environment.judge()


def _kill_one_that_works(environment: Environment, workers: Workers) -> None:
    """The time in which others take over what a killed worker ran."""
    ids = environment.enqueue(wait, [("go",)] * 2 * len(workers.members))
    ids += environment.enqueue(wait_and_pay, [("go",)] * 2 * len(workers.members))
    environment.until_started(*ids)
    killed = workers.some()
    theirs = [
        event.job
        for event in environment.history(START)
        if event.job in ids and event.worker == killed.name
    ]
    workers.kill(killed)
    workers.add()
    began = time.monotonic()
    environment.until_started(*theirs, attempt=2, seconds=P4)
    environment.timed(began)
    environment.open("go")
