"""Queues keep their shares, jobs age, and keys take turns, while workers are killed."""

from __future__ import annotations

import time
from datetime import timedelta

from chaos.environment import Environment
from chaos.history import END, START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import AT_ONCE, call, note, queue
from chaos.scenario import Size, scenario
from pgqueue import JobContext

SLOTS = 4
MILLISECONDS = 50
AGE_AFTER = timedelta(seconds=1)
PRIORITY_OF_AGED = 2
SHARE = 4
"""One of so many starts is of the queue with the weight 1; the other one has the weight 3."""

FIRST_STARTS = """
    SELECT count(*) FILTER (WHERE queue = 'quiet') FROM (
        SELECT queue FROM pgqueue.jobs WHERE started_at IS NOT NULL AND queue IN ('busy', 'quiet')
        ORDER BY started_at LIMIT :most
    ) AS first
"""
STARTS_AFTER = """
    SELECT count(*) FROM pgqueue.jobs AS aged, pgqueue.jobs AS urgent
    WHERE aged.id = :aged AND urgent.priority = 0 AND urgent.started_at > aged.started_at
"""
STARTS_BEFORE = """
    SELECT count(*) FROM pgqueue.jobs AS single, pgqueue.jobs AS other
    WHERE single.id = :single AND other.args ->> 'key' = 'red'
      AND other.started_at BETWEEN single.created_at AND single.started_at
"""
STARTS_IN_A_ROUND = 40
"""Which the workers may make on a busy machine until the admission that follows an enqueue."""


@queue.task(retry=AT_ONCE, fair_by="key")
def call_by_turns(ctx: JobContext, key: str, milliseconds: float = 0) -> None:
    """Something that keys take turns to do."""
    note(START, ctx, key=key)
    time.sleep(milliseconds / 1000)
    note(END, ctx, key=key)


@mutation
def urgent_queues_are_served_first(patch: Patch) -> None:
    """A worker with weights fills its slots from the first queue that has jobs."""
    from pgqueue.worker.claiming.shares import Shares

    patch.set(Shares, "order", lambda _, queues: list(queues))
    patch.set(Shares, "turn", lambda *given: given[-1])


@mutation
def jobs_do_not_age(patch: Patch) -> None:
    """A worker with ``age_after`` serves by priority."""
    from pgqueue.worker.claiming.aging import Aging

    patch.set(Aging, "in_order", lambda _, pairs: list(pairs))


@mutation
def no_key_gets_a_turn(patch: Patch) -> None:
    """Jobs are admitted in the order of their times, whatever their keys."""
    from pgqueue.rules import admission

    patch.set(admission, "_in_turns", lambda jobs, _: jobs)


@scenario(
    promises="P15",
    full=Size(jobs=5_000, workers=8, faults=40),
    short=Size(jobs=400, workers=4, faults=3),
    mutated={
        "urgent_queues_are_served_first": "of the first",
        "jobs_do_not_age": "of the urgent jobs",
        "no_key_gets_a_turn": "waited for",
    },
    alone=True,
)
def order_under_kills(environment: Environment, size: Size) -> None:
    """kill -9 beside a backlog: a queue has its share, jobs age, single jobs have their turn."""
    rows = [(MILLISECONDS,)] * size.jobs
    busy = call.options(queue="busy", max_attempts=1000)
    environment.enqueue(busy.options(priority=0), rows)
    aged = environment.enqueue(busy.options(priority=PRIORITY_OF_AGED), rows[: size.faults])
    environment.enqueue(call.options(queue="quiet", priority=9, max_attempts=1000), rows)
    environment.enqueue(call_by_turns.options(queue="turns"), [("red", 25)] * size.jobs)
    workers = environment.workers(
        size.workers,
        concurrency=SLOTS,
        poll_interval=0.1,
        queues={"busy": SHARE - 1, "quiet": 1, "turns": 2},
        age_after=AGE_AFTER,
    )
    singles = []
    for number in range(size.faults):
        environment.until_ended_are((number + 1) * size.jobs // (2 * size.faults))
        workers.kill_one()
        singles += environment.enqueue(call_by_turns.options(queue="turns"), [(f"green{number}",)])
    environment.finish(workers)
    quiet = environment.scalar(FIRST_STARTS, most=size.jobs)
    fair = size.jobs // SHARE
    environment.expect(
        fair // 2 < quiet < 2 * fair,
        f"{quiet} of the first {size.jobs} starts were of a queue whose share is one in {SHARE}",
    )
    for job in aged:
        left = environment.scalar(STARTS_AFTER, aged=job)
        environment.expect(
            left > size.jobs // 20, f"an aged job started after all but {left} of the urgent jobs"
        )
    # Twice: a job may be admitted for a worker that is killed before it claims.
    bound = 2 * (size.workers * SLOTS + SLOTS) + STARTS_IN_A_ROUND
    for single in singles:
        before = environment.scalar(STARTS_BEFORE, single=single)
        environment.expect(before <= bound, f"a single job waited for {before} of a backlog")
    environment.judge()
