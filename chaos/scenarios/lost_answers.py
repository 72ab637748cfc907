"""The network takes an answer away: nobody knows whether the server has done what it was told."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, NullPool, create_engine
from sqlalchemy.exc import DBAPIError

from chaos.chores import call, pay, pay_async
from chaos.fleet import Fleet
from chaos.plants import Patch, plant
from chaos.proxy import COMMIT, UNPREPARED, Proxy
from chaos.scenario import Size, scenario
from chaos.stage import Stage
from pgqueue import Task

ENQUEUE = b"INSERT INTO pgqueue.jobs"
CLAIM = b"WITH due AS"
LOCK = b"WITH message AS"
STAMP = b"held) SELECT pgqueue.jobs.id"
SETTLE = b"WITH gone AS"
EFFECT = b"INTO effects"

PAYING = (pay, pay_async)
ALL = (*PAYING, call)
Point = tuple[bytes, bytes, tuple[Task[..., Any], ...]]
"""Where to cut, after which words, and the tasks whose jobs come by there."""


@plant
def unique_keys_are_not_held(patch: Patch) -> None:
    """A job is enqueued without taking its unique key."""
    from pgqueue.repository import Jobs

    def enqueue(self, new, *, args, unique_key):  # type: ignore[no-untyped-def]
        return with_key(self, new, args=args, unique_key=None)

    with_key = patch.set(Jobs, "enqueue", enqueue)


@plant
def claims_are_not_reconciled(patch: Patch) -> None:
    """A claimer never asks what else it holds by what the database says."""
    from pgqueue.worker.claimer import Claimer

    patch.set(Claimer, "_reconcile", lambda self, connection: None)


@plant
def settles_are_not_repeated(patch: Patch) -> None:
    """A settler tells the database once how an attempt has ended, whatever comes back."""
    from pgqueue.worker.settler import Settler

    def once(self):  # type: ignore[no-untyped-def]
        settle, part = self._left.pop(0)
        self._line.attempt(lambda connection: self._try(settle, part, connection))

    patch.set(Settler, "_settle_next", once)


@plant
def unknown_commits_count(patch: Patch) -> None:
    """A COMMIT without an answer is taken for carried out; nobody looks at the rows."""
    from pgqueue.worker import transactional

    patch.set(transactional, "was_committed", lambda crew, run: True)


@plant
def unknown_stamps_count(patch: Patch) -> None:
    """A handler starts although nobody knows whether its attempt was stamped."""
    from pgqueue.worker.turnstile import Turnstile

    def stamp(self, locked, holder):  # type: ignore[no-untyped-def]
        unstamped = locked.claimed(attempt=locked.used_attempts + 1, crashes=locked.past_crashes)
        return surely(self, locked, holder) or unstamped

    surely = patch.set(Turnstile, "stamp", stamp)


@scenario(
    promises="P1",
    research="T12",
    full=Size(jobs=500, workers=2, faults=250),
    short=Size(jobs=40, workers=1, faults=20),
    planted={"unique_keys_are_not_held": "a repeat made a second job"},
)
def lost_answers_to_enqueuers(stage: Stage, size: Size) -> None:
    """Answers to an enqueuer are lost: it is told, and a repeat with the same key finds the job."""
    with Proxy(stage.url) as proxy:
        engine = create_engine(proxy.url, poolclass=NullPool, **UNPREPARED)
        for number in range(size.jobs):
            is_cut = number < size.faults
            if is_cut:
                at = COMMIT if number % 4 < 2 else ENQUEUE
                proxy.cut(at=at, forwarding=number % 2 == 0)
            _enqueue_once(stage, engine, number, with_key=number % 3 > 0)
            stage.expect(proxy.is_idle, "the enqueuer was not told that its answer was lost")
        stage.count("cuts", proxy.cuts)
    fleet = stage.fleet("lease", size.workers)
    stage.until_ended()
    fleet.stop()
    stage.judge(succeeded=stage.scalar("SELECT count(*) FROM pgqueue.jobs"))


def _enqueue_once(stage: Stage, engine: Engine, number: int, *, with_key: bool) -> None:
    """What a careful application does.  Without a key it can only ask a person."""
    task = call.options(unique_key=f"order {number}") if with_key else call
    try:
        job = _enqueue(stage, engine, task, number)
    except DBAPIError:
        if not with_key:
            return
        job = _enqueue(stage, stage.engine, task, number)
    stage.acknowledged.add(job)
    stage.count("jobs")
    if with_key:
        same = "SELECT id FROM pgqueue.jobs WHERE (args->>'milliseconds')::float8 * 1000 = :number"
        found = [row[0] for row in stage.rows(same, number=number)]
        stage.expect(found == [job], f"order {number}: a repeat made a second job: {found}")


def _enqueue(stage: Stage, engine: Engine, task: Task[[float], int], number: int) -> int:
    with stage.queue.sessions(bind=engine) as session:
        job = task.enqueue(session, number / 1000).id
        session.commit()
    return job


@scenario(
    promises="P1 P2 P3",
    research="T12",
    full=Size(jobs=500, workers=4, faults=250),
    short=Size(jobs=120, workers=1, faults=12),
    planted={
        "claims_are_not_reconciled": "not within .* all jobs end",
        "settles_are_not_repeated": "not within .* all jobs end",
        "unknown_commits_count": "not within .* all jobs end",
    },
)
def lost_answers_in_lease_mode(stage: Stage, size: Size) -> None:
    """Answers to claims, settles and COMMITs are lost: each job ends once, and no lease is left."""
    points: list[Point] = [(CLAIM, b"", ALL), (SETTLE, b"", (call,)), (COMMIT, EFFECT, PAYING)]
    _lose_answers(stage, size, "lease", points)


@scenario(
    promises="P1 P2 P5",
    research="T12",
    full=Size(jobs=500, workers=4, faults=250),
    short=Size(jobs=120, workers=1, faults=12),
    planted={"unknown_stamps_count": "F5: .* has started twice"},
)
def lost_answers_in_transaction_mode(stage: Stage, size: Size) -> None:
    """The same for locks, stamps, settles and COMMITs of transaction mode."""
    points = [(LOCK, b"", ALL), (STAMP, b"", ALL), (SETTLE, b"", ALL), (COMMIT, EFFECT, PAYING)]
    _lose_answers(stage, size, "transaction", points)


def _lose_answers(stage: Stage, size: Size, mode: str, points: list[Point]) -> None:
    with Proxy(stage.url) as proxy:
        fleet = _behind(stage, proxy, mode, size.workers)
        share = max(size.jobs // size.faults, 3)
        for number in range(size.faults):
            at, after, tasks = points[number // 2 % len(points)]
            # Or the answer to one of theirs would be lost, which somebody else asks for.
            stage.until_ended_of([task for task in ALL if task not in tasks], seconds=4)
            proxy.cut(at=at, after=after, forwarding=number % 2 == 0)
            for task in tasks:
                stage.enqueue(task.options(max_attempts=1000), [(1,)] * (share // len(tasks)))
            stage.until(lambda: proxy.is_idle, what=f"{at!r} is sent")
        stage.count("cuts", proxy.cuts)
        stage.until_ended(seconds=4)
        fleet.stop()
    stage.judge()


def _behind(stage: Stage, proxy: Proxy, mode: str, workers: int) -> Fleet:
    fleet = stage.fleet(mode, 0, engine=UNPREPARED, poll_interval=0.1, concurrency=2)
    for _ in range(workers):
        fleet.add(url=proxy.url).was_harmed = True
    return fleet
