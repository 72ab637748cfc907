"""The network takes an answer away: nobody knows whether the server has done what it was told."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, NullPool, create_engine
from sqlalchemy.exc import DBAPIError

from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.proxy import COMMIT, UNPREPARED, Proxy
from chaos.sample_tasks import call, pay, pay_async
from chaos.scenario import Size, scenario
from pgqueue import Task

ENQUEUE = b"INSERT INTO pgqueue.jobs"
CLAIM = b"WITH due AS"
SETTLE = b"WITH gone AS"
EFFECT = b"INTO effects"

PAYING = (pay, pay_async)
ALL = (*PAYING, call)
Point = tuple[bytes, bytes, tuple[Task[..., Any], ...]]
"""Where to cut, after which words, and the tasks whose jobs come by there."""


@mutation
def unique_keys_are_not_held(patch: Patch) -> None:
    """A job is enqueued without taking its unique key."""
    from pgqueue.repository.enqueue import Enqueues

    def enqueue(self, new, text, *, unique_key, **limits):  # type: ignore[no-untyped-def]
        return with_key(self, new, text, unique_key=None, **limits)

    with_key = patch.set(Enqueues, "try_to_enqueue", enqueue)


@mutation
def claims_are_not_reconciled(patch: Patch) -> None:
    """A claimer never asks what else it holds by what the database says."""
    from pgqueue.worker.claimer import Claimer

    patch.set(Claimer, "_reconcile", lambda self, connection: None)


@mutation
def settles_are_not_repeated(patch: Patch) -> None:
    """A settler tells the database once how an attempt has ended, whatever comes back."""
    from pgqueue.worker.settler import Settler

    tried = Settler._try

    def once(self, settle, batch, connection):  # type: ignore[no-untyped-def]
        try:
            return tried(self, settle, batch, connection)
        except BaseException:
            del self._left[0]
            raise

    patch.set(Settler, "_try", once)


@mutation
def unknown_commits_count(patch: Patch) -> None:
    """A COMMIT without an answer is taken for carried out; the server is not asked."""
    from pgqueue.repository.fate import Fate
    from pgqueue.worker import pool_transaction

    patch.set(pool_transaction, "fate_of", lambda *_, **__: Fate.COMMITTED)


@scenario(
    promises="P1 P2 P3",
    full=Size(jobs=500, workers=4, faults=250),
    short=Size(jobs=120, workers=1, faults=12),
    mutated={
        "unique_keys_are_not_held": "a repeat made a second job",
        "claims_are_not_reconciled": "not within .* all jobs end",
        "settles_are_not_repeated": "not within .* all jobs end",
        "unknown_commits_count": "not within .* all jobs end",
    },
)
def lost_answers(environment: Environment, size: Size) -> None:
    """Answers to enqueues, claims, settles, COMMITs are lost: each job is there once, ends once."""
    _lose_answers_to_enqueues(environment, 2 * size.faults)
    environment.finish(environment.workers(1))
    points: list[Point] = [(CLAIM, b"", ALL), (SETTLE, b"", (call,)), (COMMIT, EFFECT, PAYING)]
    with Proxy(environment.url) as proxy:
        workers = environment.workers(0, engine=UNPREPARED, poll_interval=0.1, concurrency=2)
        for _ in range(size.workers):
            workers.add(url=proxy.url).was_harmed = True
        share = max(size.jobs // size.faults, 3)
        for number in range(size.faults):
            at, after, tasks = points[number // 2 % len(points)]
            # Or the answer to one of theirs would be lost, which somebody else asks for.
            environment.until_ended_of([task for task in ALL if task not in tasks], seconds=4)
            proxy.cut(at=at, after=after, forwarding=number % 2 == 0)
            for task in tasks:
                environment.enqueue(task.options(max_attempts=1000), [(1,)] * (share // len(tasks)))
            environment.until(lambda: proxy.is_idle, what=f"{at!r} is sent")
        environment.count("cuts", proxy.cuts)
        environment.until_ended(seconds=4)
        workers.stop()
    environment.judge(succeeded=environment.scalar("SELECT count(*) FROM pgqueue.jobs"))


def _lose_answers_to_enqueues(environment: Environment, jobs: int) -> None:
    """Every second one.  The enqueuer is told, and a repeat with the same key finds the job."""
    with Proxy(environment.url) as proxy:
        engine = create_engine(proxy.url, poolclass=NullPool, **UNPREPARED)
        for number in range(jobs):
            if number % 2:
                at = COMMIT if number % 8 < 4 else ENQUEUE
                proxy.cut(at=at, forwarding=number % 4 < 2)
            _enqueue_once(environment, engine, number, with_key=number % 3 > 0)
            environment.expect(proxy.is_idle, "the enqueuer was not told that its answer was lost")
        environment.count("cuts", proxy.cuts)


def _enqueue_once(environment: Environment, engine: Engine, number: int, *, with_key: bool) -> None:
    """What a careful application does.  Without a key it can only ask a person."""
    task = call.options(unique_key=f"order {number}") if with_key else call
    try:
        job = _enqueue(environment, engine, task, number)
    except DBAPIError:
        if not with_key:
            return
        job = _enqueue(environment, environment.engine, task, number)
    environment.acknowledged.add(job)
    environment.count("jobs")
    if with_key:
        same = "SELECT id FROM pgqueue.jobs WHERE (args->>'milliseconds')::float8 * 1000 = :number"
        found = [row[0] for row in environment.rows(same, number=number)]
        environment.expect(found == [job], f"order {number}: a repeat made a second job: {found}")


def _enqueue(
    environment: Environment, engine: Engine, task: Task[[float], int], number: int
) -> int:
    with environment.queue.sessions(bind=engine) as session:
        job = task.enqueue(session, number / 1000).id
        session.commit()
    return job
