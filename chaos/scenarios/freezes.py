"""Workers that stand still past their death, and come back with a result."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count

from sqlalchemy import and_, delete, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from chaos.environment import Environment
from chaos.history import END, START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import (
    AT_A_GATE,
    AT_ONCE,
    EFFECT,
    LOOK_EVERY,
    attend,
    attend_async,
    directory,
    effect,
    is_open,
    note,
    queue,
    until_open,
    worker_name,
)
from chaos.scenario import Size, scenario
from chaos.workers import Member, Workers
from pgqueue import JobContext
from pgqueue.worker import liveness

LATE = ("its result is not kept: too late", "its lease had passed on")
HOLD_HEARTBEATS = text("LOCK TABLE pgqueue.workers IN SHARE ROW EXCLUSIVE MODE")
"""Not the row alone: the beat of one that was declared dead finds none, and waits for no lock."""
PATIENT_FOR = 3.0
CLAIMABLE = 5.0
"""Seconds after the grace: 35 are promised in all."""
SIGNED = "SELECT id FROM pgqueue.jobs WHERE id = ANY(:ids) AND result #>> '{}' = ANY(:names)"
MANY = {"max_connections": "600"}


def gate_of(ctx: JobContext, turn: int) -> str:
    """The first run of a job ends when the scenario says so, and all others when it says so.

    Not by the number of the attempt, which begins anew with a requeue.
    """
    try:
        (directory() / f"began-{ctx.job_id}").touch(exist_ok=False)
    except FileExistsError:
        return f"{turn}-again"
    return f"{turn}-first"


async def until_open_async(gate: str) -> None:
    while not is_open(gate):
        await asyncio.sleep(LOOK_EVERY)


@queue.task(retry=AT_ONCE, max_attempts=1000)
def outlast(ctx: JobContext, turn: int) -> int:
    return attend(ctx, lambda: until_open(gate_of(ctx, turn)))


@queue.task(retry=AT_ONCE, max_attempts=1000)
async def outlast_async(ctx: JobContext, turn: int) -> int:
    return await attend_async(ctx, until_open_async(gate_of(ctx, turn)))


@queue.task(retry=AT_ONCE, max_attempts=1000)
def outlast_and_pay(session: Session, ctx: JobContext, turn: int) -> int:
    session.execute(EFFECT, effect(ctx))
    return attend(ctx, lambda: until_open(gate_of(ctx, turn)))


@queue.task(retry=AT_ONCE, max_attempts=1000)
async def outlast_and_pay_async(session: AsyncSession, ctx: JobContext, turn: int) -> int:
    await session.execute(EFFECT, effect(ctx))
    return await attend_async(ctx, until_open_async(gate_of(ctx, turn)))


@queue.task(retry=AT_ONCE, max_attempts=1)
def outlast_once(ctx: JobContext, turn: int) -> str:
    """Gives the name of the worker that ran it."""
    attend(ctx, lambda: until_open(gate_of(ctx, turn)))
    return worker_name()


@queue.task(retry=AT_ONCE, max_attempts=1000)
def outlast_and_pay_in_a_step(ctx: JobContext, turn: int) -> int:
    gate = gate_of(ctx, turn)

    def outlast_in_transaction(session: Session) -> None:
        session.execute(EFFECT, effect(ctx))
        until_open(gate)

    note(START, ctx)
    try:
        ctx.step("pay", outlast_in_transaction)
    finally:  # a step of a lost attempt raises
        note(END, ctx)
    return ctx.attempt


TASKS = (
    *(outlast, outlast_async, outlast_once),
    *(outlast_and_pay, outlast_and_pay_async, outlast_and_pay_in_a_step),
)


@mutation
def steps_without_fence(patch: Patch) -> None:
    """A step is recorded by the id of its job, whoever has the lease."""
    from pgqueue.repository import steps
    from pgqueue.repository.tables import leases

    patch.set(steps, "is_ours", lambda job_id, *_: leases.c.target_id == job_id)


@mutation
def writes_outside_the_transaction(patch: Patch) -> None:
    """A transactional handler's session commits by itself, apart from the job's completion."""
    from pgqueue.handler import transaction
    from pgqueue.worker.pool_transaction import PoolTransaction

    def apart(sessions, connection, **_):  # type: ignore[no-untyped-def]
        engine = connection.engine.execution_options(isolation_level="AUTOCOMMIT")
        return sessions(bind=engine)

    # A session apart has no listeners.
    patch.set(PoolTransaction, "call_listeners", lambda *_: None)
    patch.set(transaction, "joined_session", apart)


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
    promises="P2 P3 P4",
    full=Size(jobs=1000, workers=8, faults=100, seconds=5),
    long=Size(jobs=1500, workers=8, faults=150, seconds=liveness.SLOW_GRACE.total_seconds()),
    short=Size(jobs=20, workers=3, faults=2, seconds=1.5),
    mutated={
        "fence_on_attempts": "a late result has ended",
        "writes_outside_the_transaction": "F3: .* break it",
        "steps_without_fence": "F4: .* break it",
    },
    settings=MANY,
)
def zombies(environment: Environment, size: Size) -> None:
    """SIGSTOP past the death, SIGCONT: jobs run elsewhere in time, a late result changes nothing.

    Of jobs with one attempt the first attempt runs elsewhere again: they are requeued.
    """
    frozen = max(1, size.workers * 5 // 8)
    jobs = size.jobs * frozen // size.faults
    workers = environment.workers(
        size.workers, concurrency=2 * jobs // 3 + 2, alone_for=AT_A_GATE, slow_grace=size.seconds
    )
    workers.until_registered()
    expected = 0
    for turn in _turns(environment, size):
        stopped, theirs = _freeze_in_handlers(environment, workers, turn, jobs, frozen)
        environment.until(
            lambda stopped=stopped: not any(map(environment.leases_of, stopped)),  # type: ignore[misc]
            seconds=size.seconds + CLAIMABLE,
            what="what the frozen workers held is claimable",
        )
        environment.open(f"{turn}-first")
        _requeue_failed(environment, theirs)
        _until_taken_over(environment, theirs)
        expected += len(theirs)
        with environment.engine.begin() as connection:
            # The results come before a heartbeat tells their worker that it is dead.
            connection.execute(HOLD_HEARTBEATS)
            _come_back_late(environment, stopped, theirs, refused=expected)
        workers.until_registered()
        environment.open(f"{turn}-again")
        environment.until_ended()
        names = [zombie.name for zombie in stopped]
        wrong = environment.rows(SIGNED, ids=theirs, names=names)
        environment.expect(not wrong, f"a late result has ended {wrong[:5]}")
    workers.stop()
    refused = _refused(environment)
    environment.count("late results refused", refused)
    environment.expect(refused > 0, "no late result was counted as stale")
    environment.judge()


def _requeue_failed(environment: Environment, theirs: list[int]) -> None:
    """Those whose only attempt has crashed, when it has."""
    once = "SELECT id FROM pgqueue.jobs WHERE id = ANY(:ids) AND max_attempts = 1"
    jobs = [row[0] for row in environment.rows(once, ids=theirs)]
    environment.until(
        lambda: len(_ended_of(environment, jobs)) == len(jobs), what="the only attempts crash"
    )
    for job in jobs:
        environment.requeue(job)


def _turns(environment: Environment, size: Size) -> Iterator[int]:
    """One after the other, until so many were frozen at their work: not each always has some."""
    for turn in count():
        yield turn
        if environment.counts["freezes"] >= size.faults:
            return


def _freeze_in_handlers(
    environment: Environment, workers: Workers, turn: int, jobs: int, frozen: int
) -> tuple[list[Member], list[int]]:
    """Freeze some workers while they run handlers, and say which jobs those are.

    One of them runs, in turns, a job of a single attempt, whose requeue begins the attempts anew,
    and a job that writes in its transaction.
    """
    of_task = {
        task.name: environment.enqueue(task, [(turn,)] * (jobs // len(TASKS))) for task in TASKS
    }
    ids = [id for each in of_task.values() for id in each]
    environment.until_started(*ids)
    runs = [
        (event.worker, event.job) for event in environment.history(START) if event.job in set(ids)
    ]
    wanted = of_task[(outlast_once, outlast_and_pay)[turn % 2].name]
    having = {worker for worker, job in runs if job in wanted}
    first = environment.dice.choice([one for one in workers.members if one.name in having])
    busy = {worker for worker, _ in runs} - {first.name}
    others = [one for one in workers.members if one.name in busy]
    zombies = [first, *environment.dice.sample(others, min(frozen - 1, len(others)))]
    for zombie in zombies:
        environment.freeze(zombie)
    names = {zombie.name for zombie in zombies}
    return zombies, [job for worker, job in runs if worker in names]


def _until_taken_over(environment: Environment, theirs: list[int]) -> None:
    """Until each runs elsewhere; a busy machine may cost it more than one attempt on the way."""

    def run_elsewhere() -> bool:
        starts = Counter(event.job for event in environment.history(START))
        return all(starts[job] > 1 for job in theirs)

    environment.until(run_elsewhere, what="the jobs of the zombies are taken over")
    for member in environment.members:
        member.was_harmed = True  # so short a grace may also be too short for one that is well


def _come_back_late(
    environment: Environment, zombies: list[Member], theirs: list[int], *, refused: int
) -> None:
    """Let them come back, and their first attempts return; nothing may come of it."""
    for zombie in zombies:
        zombie.thaw()
    late = {(job, 1) for job in theirs}
    # Not more than a while: one that was declared dead before it was frozen has no result to give.
    patient_until = time.monotonic() + PATIENT_FOR

    def have_returned() -> bool:
        ended = _ended_of(environment, theirs)
        environment.expect(not ended, f"a late result has ended {ended}, which run elsewhere")
        back = {(event.job, event.attempt) for event in environment.history(END)}
        are_counted = _refused(environment) >= refused or time.monotonic() > patient_until
        return late <= back and are_counted

    environment.until(have_returned, what="the handlers of the zombies end")


def _refused(environment: Environment) -> int:
    logs = [member.log.read_text() for member in environment.members]
    return sum(log.count(words) for log in logs for words in LATE)


def _ended_of(environment: Environment, jobs: list[int]) -> list[int]:
    ended = "SELECT id FROM pgqueue.jobs WHERE outcome IS NOT NULL AND id = ANY(:jobs)"
    return [row[0] for row in environment.rows(ended, jobs=jobs)]
