"""Queues keep their shares, and jobs age, while workers are killed."""

from __future__ import annotations

from datetime import timedelta

from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import call
from chaos.scenario import Size, scenario

SLOTS = 4
MILLISECONDS = 50
AGE_AFTER = timedelta(seconds=1)
PRIORITY_OF_AGED = 2
SHARE = 4
"""One of so many starts is of the queue with the weight 1; the other one has the weight 3."""

FIRST_STARTS = """
    SELECT count(*) FILTER (WHERE queue = 'quiet') FROM (
        SELECT queue FROM pgqueue.jobs WHERE started_at IS NOT NULL
        ORDER BY started_at LIMIT :most
    ) AS first
"""
STARTS_AFTER = """
    SELECT count(*) FROM pgqueue.jobs AS aged, pgqueue.jobs AS urgent
    WHERE aged.id = :aged AND urgent.priority = 0 AND urgent.started_at > aged.started_at
"""


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


@scenario(
    promises="P15",
    research="L1",
    full=Size(jobs=3_000, workers=8, faults=40),
    short=Size(jobs=300, workers=4, faults=3),
    mutated={"urgent_queues_are_served_first": "of the first"},
    alone=True,
)
def shares_under_kills(environment: Environment, size: Size) -> None:
    """kill -9: a queue has its share of the starts beside a more urgent backlog."""
    rows = [(MILLISECONDS,)] * size.jobs
    environment.enqueue(call.options(queue="busy", priority=0, max_attempts=1000), rows)
    environment.enqueue(call.options(queue="quiet", priority=9, max_attempts=1000), rows)
    _kill_some(environment, size, queues=[f"busy={SHARE - 1},quiet=1"])
    quiet = environment.scalar(FIRST_STARTS, most=size.jobs)
    fair = size.jobs // SHARE
    environment.expect(
        fair // 2 < quiet < 2 * fair,
        f"{quiet} of the first {size.jobs} starts were of a queue whose share is one in {SHARE}",
    )
    environment.check(succeeded=2 * size.jobs)


@scenario(
    promises="P15",
    research="L1",
    full=Size(jobs=8_000, workers=8, faults=40),
    short=Size(jobs=1_600, workers=4, faults=3),
    mutated={"jobs_do_not_age": "of the urgent jobs"},
    alone=True,
)
def ages_under_kills(environment: Environment, size: Size) -> None:
    """kill -9: less urgent jobs start before a backlog of urgent ones has ended."""
    urgent = call.options(queue="busy", priority=0, max_attempts=1000)
    aged = call.options(queue="busy", priority=PRIORITY_OF_AGED, max_attempts=1000)
    environment.enqueue(urgent, [(MILLISECONDS,)] * size.jobs)
    few = environment.enqueue(aged, [(MILLISECONDS,)] * size.faults)
    _kill_some(environment, size, queues=["busy"], age_after=AGE_AFTER)
    for job in few:
        left = environment.scalar(STARTS_AFTER, aged=job)
        environment.expect(
            left > size.jobs // 20, f"an aged job started after all but {left} of the urgent jobs"
        )
    environment.check(succeeded=size.jobs + len(few))


def _kill_some(environment: Environment, size: Size, **options: object) -> None:
    """Kill workers until a third of the jobs has ended; return when all have ended."""
    workers = environment.workers(
        size.workers, **{"concurrency": SLOTS, "poll_interval": 0.1, **options}
    )
    for number in range(size.faults):
        environment.until_ended_are((number + 1) * size.jobs // (3 * size.faults))
        workers.kill_one()
    environment.until_ended()
    workers.stop()
