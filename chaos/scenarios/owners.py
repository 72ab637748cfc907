"""Two workers that both believe a job to be theirs."""

from __future__ import annotations

from sqlalchemy import and_, delete

from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import AT_ONCE, attend, queue, until_open, worker_name
from chaos.scenario import Size, scenario
from chaos.scenarios.freezes import HOLD_HEARTBEATS
from pgqueue import JobContext

WRONG_RESULTS = "SELECT id, result FROM pgqueue.jobs WHERE result #>> '{}' != :name"
TOO_LATE = "its result is not kept: too late"


@queue.task(retry=AT_ONCE, max_attempts=1)
def sign(ctx: JobContext, turn: int) -> str:
    """Gives the name of the worker that ran it, when the scenario lets that worker go on."""
    attend(ctx, lambda: until_open(f"{turn}-{worker_name()}"))
    return worker_name()


@mutation
def fence_on_attempts(patch: Patch) -> None:
    """The fence compares the number of the attempt, which begins anew with a requeue, and not
    message and worker."""
    from pgqueue.repository import fence, settle
    from pgqueue.repository.tables import leases

    def by_attempt(given):  # type: ignore[no-untyped-def]
        the_attempt = and_(
            leases.c.target_id == given.c.target_id, leases.c.attempt == given.c.attempt
        )
        return (
            delete(leases)
            .where(the_attempt)
            .returning(
                leases.c.target_id,
                given.c.message_id,
                leases.c.attempt,
                leases.c.crashes,
                leases.c.worker_id,
                leases.c.started_at,
            )
            .cte("gone")
        )

    patch.set(fence, "deleted_leases", by_attempt)
    patch.rebuild(settle.settle, settle.settle_succeeded)


@scenario(
    promises="P3",
    research="T7 T8",
    full=Size(jobs=5000, faults=20),
    short=Size(jobs=8, faults=1),
    mutated={"fence_on_attempts": "ended by the worker that had lost it"},
    settings={"max_connections": "400"},
)
def first_attempts_of_two_owners(environment: Environment, size: Size) -> None:
    """Frozen in attempt 1, rescued, requeued, attempt 1 elsewhere: the first owner ends nothing."""
    each = size.jobs // size.faults
    for turn in range(size.faults):
        workers = environment.workers(1, concurrency=each, slow_grace=1.5)
        [zombie] = workers.members
        jobs = environment.enqueue(sign, [(turn,)] * each)
        environment.until_started(*jobs)
        environment.freeze(zombie)
        owner = workers.add()
        environment.until(
            lambda: environment.unfinished() == 0, what="their only attempt has crashed"
        )
        _requeue(environment, jobs)
        environment.until(
            lambda owner=owner: environment.leases_of(owner) == each,  # type: ignore[misc]
            what="the other worker has all of them, in their first attempt",
        )
        with environment.engine.begin() as connection:
            # The late results come before a heartbeat tells their worker that it is dead.
            connection.execute(HOLD_HEARTBEATS)
            environment.open(f"{turn}-{zombie.name}")
            zombie.thaw()
            log = zombie.log
            environment.until(
                lambda log=log: TOO_LATE in log.read_text() or environment.unfinished() < each,  # type: ignore[misc]
                what="the late results are in",
            )
        environment.expect(
            environment.unfinished() == each, "a job was ended by the worker that had lost it"
        )
        environment.open(f"{turn}-{owner.name}")
        environment.until_ended()
        wrong = environment.rows(WRONG_RESULTS + " AND id = ANY(:ids)", name=owner.name, ids=jobs)
        environment.expect(not wrong, f"ended by the worker that had lost it: {wrong[:5]}")
        workers.stop()
    environment.check()


def _requeue(environment: Environment, jobs: list[int]) -> None:
    for job in jobs:
        with environment.queue.session() as session, session.begin():
            environment.queue.requeue(session, job)
    environment.counts["requeues"] = 1  # of each job: what the judge multiplies max_attempts by
