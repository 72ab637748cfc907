"""kill -9, again and again, while handlers write."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from sqlalchemy import text

from chaos.environment import Environment
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import call, pay, pay_and_follow, pay_async, wait
from chaos.scenario import Size, scenario
from pgqueue.worker import liveness


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
def rescue_loses_the_message(patch: Patch) -> None:
    """A rescuer takes a dead worker's leases away and writes no new messages."""
    from pgqueue.repository.workers import Workers

    orphans = text(
        "DELETE FROM pgqueue.leases AS lease USING pgqueue.workers AS worker"
        " WHERE worker.id = lease.worker_id AND worker.dead_at IS NOT NULL"
    )

    def rescue(self):  # type: ignore[no-untyped-def]
        self._executor.execute(orphans)
        return []

    patch.set(Workers, "rescue", rescue)


@scenario(
    promises="P1 P2 P3 P4 P5",
    research="T2",
    full=Size(jobs=50_000, workers=8, faults=200),
    short=Size(jobs=400, workers=3, faults=8),
    mutated={
        "rescue_loses_the_message": "no worker will ever run it",
        "writes_outside_the_transaction": "F3: .* break it",
    },
    alone=True,
)
def kills(environment: Environment, size: Size) -> None:
    """kill -9: what the dead held is rescued, and no job is lost or done twice."""
    share = size.jobs // 4
    # Where few are killed, each death has to meet a handler between its write and its end.
    milliseconds = 8 if size.faults < 100 else 1
    for task in (pay, pay_async, call):
        environment.enqueue(task.options(max_attempts=1000), [(milliseconds,)] * share)
    parents = environment.enqueue(
        pay_and_follow.options(max_attempts=1000), [(milliseconds,)] * (share // 2)
    )
    total = environment.unfinished() + len(parents)
    workers = environment.workers(size.workers, concurrency=4, poll_interval=0.1)
    for number in range(size.faults):
        # Not by what is left: while jobs enqueue others, that stays the same.
        environment.until_ended_are((number + 1) * total // (size.faults + 2))
        workers.kill_one()
    environment.finish(workers)
    environment.check(succeeded=total)


@mutation
def death_is_noticed_late(patch: Patch) -> None:
    """The grace of a worker whose connection is gone is as long as that of a frozen one."""
    patch.set(liveness, "FAST_GRACE", liveness.SLOW_GRACE)


@scenario(
    promises="P4",
    research="T2",
    full=Size(jobs=400, faults=10),
    short=Size(jobs=40, faults=1),
    mutated={"death_is_noticed_late": "claimable again after|not within"},
)
def recovery_after_a_kill(environment: Environment, size: Size) -> None:
    """kill -9 of a worker that holds jobs: all of them are claimable within two seconds."""
    for number in range(size.faults):
        jobs = environment.enqueue(wait, [(f"go{number}",)] * (size.jobs // size.faults))
        victim = environment.workers(1, concurrency=2, poll_interval=0.1).members[0]
        environment.until_started(*jobs[:1])
        watcher = environment.workers(1, concurrency=2, poll_interval=0.1)
        watcher.until_registered()
        held = partial(environment.leases_of, victim)
        environment.until(held, what="it holds leases")
        environment.kill(victim)
        began = time.monotonic()
        environment.until(partial(_is_none, held), seconds=5, what="its jobs are claimable")
        took = time.monotonic() - began
        environment.expect(
            took <= 2, f"its jobs are claimable again after {took:.2f} s, promised are 2"
        )
        environment.open(f"go{number}")
        environment.finish(watcher)
    environment.check()


def _is_none(count: Callable[[], int]) -> bool:
    return count() == 0
