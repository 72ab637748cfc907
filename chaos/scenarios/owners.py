"""Two workers that both believe a job to be theirs."""

from __future__ import annotations

import time

from sqlalchemy import and_, delete

from chaos.chores import AT_ONCE, LOOK_EVERY, is_open, note, queue, worker_name
from chaos.history import END, START
from chaos.plants import Patch, plant
from chaos.scenario import Size, scenario
from chaos.scenarios.freezes import HOLD_HEARTBEATS
from chaos.stage import Stage
from pgqueue import JobContext

LEASED_BY = """
    SELECT count(*) FROM pgqueue.leases JOIN pgqueue.workers ON id = worker_id WHERE pid = :pid
"""
WRONG_RESULTS = "SELECT id, result FROM pgqueue.jobs WHERE result #>> '{}' != :name"
TOO_LATE = "its result is not kept: too late"


@queue.task(retry=AT_ONCE, max_attempts=1)
def sign(ctx: JobContext, turn: int) -> str:
    """Gives the name of the worker that ran it, when the scenario lets that worker go on."""
    note(START, ctx)
    while not is_open(f"{turn}-{worker_name()}"):
        time.sleep(LOOK_EVERY)
    note(END, ctx)
    return worker_name()


@plant
def fence_on_attempts(patch: Patch) -> None:
    """The fence compares the number of the attempt, which begins anew with a requeue, and not
    message and worker."""
    from pgqueue.statements import fencing, settling
    from pgqueue.statements.tables import leases

    def by_attempt(said, *, held):  # type: ignore[no-untyped-def]
        the_attempt = and_(
            leases.c.target_id == said.c.target_id, leases.c.attempt == said.c.attempt
        )
        return (
            delete(leases)
            .where(the_attempt, leases.c.held == held)
            .returning(
                leases.c.target_id,
                said.c.message_id,
                leases.c.attempt,
                leases.c.crashes,
                leases.c.worker_id,
                leases.c.started_at,
            )
            .cte("gone")
        )

    patch.set(fencing, "deleted_leases", by_attempt)
    patch.rebuild(settling.settle, settling.settle_succeeded)


@scenario(
    promises="P3",
    research="T7 T8",
    full=Size(jobs=5000, faults=20),
    short=Size(jobs=8, faults=1),
    planted={"fence_on_attempts": "ended by the worker that had lost it"},
    settings={"max_connections": "400"},
)
def first_attempts_of_two_owners(stage: Stage, size: Size) -> None:
    """Frozen in attempt 1, rescued, requeued, attempt 1 elsewhere: the first owner ends nothing."""
    each = size.jobs // size.faults
    for turn in range(size.faults):
        fleet = stage.fleet("lease", 1, concurrency=each, slow_grace=1.5)
        [zombie] = fleet.members
        jobs = stage.enqueue(sign, [(turn,)] * each)
        stage.until_started(*jobs)
        zombie.freeze()
        stage.count("freezes")
        owner = fleet.add()
        stage.until(lambda: stage.unfinished() == 0, what="their only attempt has crashed")
        _requeue(stage, jobs)
        stage.until(
            lambda owner=owner: stage.scalar(LEASED_BY, pid=owner.pid) == each,  # type: ignore[misc]
            what="the other worker has all of them, in their first attempt",
        )
        with stage.engine.begin() as connection:
            # The late results come before a heartbeat tells their worker that it is dead.
            connection.execute(HOLD_HEARTBEATS)
            stage.open(f"{turn}-{zombie.name}")
            zombie.thaw()
            log = zombie.log
            stage.until(
                lambda log=log: TOO_LATE in log.read_text() or stage.unfinished() < each,  # type: ignore[misc]
                what="the late results are in",
            )
        stage.expect(stage.unfinished() == each, "a job was ended by the worker that had lost it")
        stage.open(f"{turn}-{owner.name}")
        stage.until_ended()
        wrong = stage.rows(WRONG_RESULTS + " AND id = ANY(:ids)", name=owner.name, ids=jobs)
        stage.expect(not wrong, f"ended by the worker that had lost it: {wrong[:5]}")
        fleet.stop()
    stage.judge()


def _requeue(stage: Stage, jobs: list[int]) -> None:
    for job in jobs:
        with stage.queue.session() as session, session.begin():
            stage.queue.requeue(session, job)
    stage.counts["requeues"] = 1  # of each job: what the judge multiplies max_attempts by
