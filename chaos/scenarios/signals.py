"""Jobs that wait for signals and gather others, while workers die."""

from __future__ import annotations

import time
from collections.abc import Callable

import sqlalchemy as sa

from chaos.environment import Environment
from chaos.history import END, START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import AT_ONCE, EFFECT, FIRST, call, effect, note, pay, queue
from pgqueue import JobContext
from pgqueue.repository import signals
from pgqueue.repository.tables import signals as rows

OF_A_ROUND = 20
"""Jobs that wait for the same signal."""
PARTS = 2
"""Jobs of each of two tasks that each of them gathers."""
ABOUT_TO_SLEEP = 0.2
"""Seconds from a look for the signal to the end of the attempt."""
TAIL = 180.0
"""Seconds for what waits, behind all other jobs."""

WAITING = "SELECT count(*) FROM pgqueue.job_steps WHERE signal = 'told' AND key = :key"
OPEN = "SELECT count(*) FROM pgqueue.jobs WHERE task = :task AND outcome IS NULL"
LOST = """
    SELECT count(DISTINCT jobs.id) FROM pgqueue.job_steps
    JOIN pgqueue.signals ON signals.name = signal AND signals.key = job_steps.key
    JOIN pgqueue.jobs ON jobs.id = job_id
    WHERE job_steps.result IS NULL AND delivered AND outcome IS NULL
    AND run_at > clock_timestamp()
    AND NOT EXISTS (SELECT FROM pgqueue.leases WHERE target_id = jobs.id)
"""


@queue.task(retry=AT_ONCE, max_attempts=1000, priority=FIRST)
def pay_when_told(ctx: JobContext, key: int) -> None:
    """A row of the application, after a signal and after the jobs that it gathers then."""
    try:
        ctx.wait_for("told", key)
    finally:  # the signal is committed while some are about to sleep
        time.sleep(ABOUT_TO_SLEEP)
    tasks = [task.options(max_attempts=1000, priority=FIRST) for task in (pay, call)]
    results = ctx.gather("parts", [task.job() for task in tasks for _ in range(PARTS)])
    assert len(results) == len(tasks) * PARTS
    note(START, ctx)
    with ctx.finish(ctx.attempt) as session:
        session.execute(EFFECT, effect(ctx))
    note(END, ctx)


@mutation
def delivers_to_those_that_sleep_already(patch: Patch) -> None:
    """A signal counts as delivered although a job is about to sleep that has not found it."""
    every = sa.update(rows).where(rows.c.id == signals.IDS).values(delivered=sa.true())
    patch.set(signals, "mark_delivered", lambda: every)


class ToldJobs:
    """Jobs that wait for signals, whose transactions are open while the jobs begin to wait."""

    def __init__(self, environment: Environment, faults: int) -> None:
        self._environment = environment
        self._rounds = faults
        self.clients: list[Callable[[], None]] = [self._tell]

    def succeeded(self) -> int:
        return self._rounds * OF_A_ROUND * (1 + 2 * PARTS)

    def _tell(self) -> None:
        environment = self._environment
        for number in range(self._rounds):
            environment.enqueue(pay_when_told, [(number,)] * OF_A_ROUND)
            with environment.queue.session() as session, session.begin():
                environment.queue.signal(session, "told", number)
                environment.until(
                    lambda key=str(number): environment.scalar(WAITING, key=key),  # type: ignore[misc]
                    seconds=TAIL,
                    what="the first jobs wait for the signal",
                )
            environment.count("signals sent while jobs begin to wait")
        environment.until(
            self._all_have_ended, seconds=TAIL, what="all jobs end that wait for signals"
        )

    def _all_have_ended(self) -> bool:
        self.judge()
        return bool(self._environment.scalar(OPEN, task=pay_when_told.name) == 0)

    def judge(self) -> None:
        lost = self._environment.scalar(LOST)
        self._environment.expect(not lost, f"{lost} jobs sleep whose signals count as delivered")
