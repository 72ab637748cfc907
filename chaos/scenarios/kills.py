"""kill -9, again and again, while handlers write."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from sqlalchemy import text

from chaos.chores import call, pay, pay_and_follow, pay_async, wait
from chaos.plants import Patch, plant
from chaos.scenario import Size, scenario
from chaos.stage import Stage
from pgqueue import maintenance


@plant
def writes_outside_the_transaction(patch: Patch) -> None:
    """A transactional handler's session commits by itself, apart from the job's completion."""
    from pgqueue.worker import held, transactional

    def apart(sessions, connection, **_):  # type: ignore[no-untyped-def]
        engine = connection.engine.execution_options(isolation_level="AUTOCOMMIT")
        return sessions(bind=engine)

    for module in (held, transactional):
        patch.set(module, "tell_of_commit", lambda *_: None)  # a session apart has no listeners
    patch.set(transactional, "joined_session", apart)


@plant
def rescue_loses_the_message(patch: Patch) -> None:
    """A rescuer takes a dead worker's leases away and writes no new messages."""
    from pgqueue.repository import Fleet

    orphans = text(
        "DELETE FROM pgqueue.leases AS lease USING pgqueue.workers AS worker"
        " WHERE worker.id = lease.worker_id AND worker.dead_at IS NOT NULL AND NOT lease.held"
    )

    def rescue(self):  # type: ignore[no-untyped-def]
        self._executor.execute(orphans)
        return []

    patch.set(Fleet, "rescue", rescue)


@scenario(
    promises="P1 P2 P5",
    research="T1",
    full=Size(jobs=50_000, workers=8, faults=200),
    short=Size(jobs=240, workers=3, faults=8),
    planted={"writes_outside_the_transaction": "F3: .* break it"},
    alone=True,
)
def kills_in_transaction_mode(stage: Stage, size: Size) -> None:
    """kill -9 in transaction mode: every job's row is written once, and only by its success."""
    _kill_while_they_pay(stage, size, "transaction", batch=5)


@scenario(
    promises="P1 P2 P3 P4 P5",
    research="T2",
    full=Size(jobs=50_000, workers=8, faults=200),
    short=Size(jobs=400, workers=3, faults=8),
    planted={"rescue_loses_the_message": "no worker will ever run it"},
    alone=True,
)
def kills_in_lease_mode(stage: Stage, size: Size) -> None:
    """kill -9 in lease mode: what the dead held is rescued, and no job is lost or done twice."""
    _kill_while_they_pay(stage, size, "lease")


@plant
def death_is_noticed_late(patch: Patch) -> None:
    """The grace of a worker whose connection is gone is as long as that of a frozen one."""
    patch.set(maintenance, "FAST_GRACE", maintenance.SLOW_GRACE)


@scenario(
    promises="P4",
    research="T2",
    full=Size(jobs=400, faults=10),
    short=Size(jobs=40, faults=1),
    planted={"death_is_noticed_late": "claimable again after|not within"},
)
def recovery_after_a_kill(stage: Stage, size: Size) -> None:
    """kill -9 of a worker that holds jobs: all of them are claimable within two seconds."""
    for number in range(size.faults):
        jobs = stage.enqueue(wait, [(f"go{number}",)] * (size.jobs // size.faults))
        victim = stage.fleet("lease", 1, concurrency=2, poll_interval=0.1).members[0]
        stage.until_started(*jobs[:1])
        watcher = stage.fleet("lease", 1, concurrency=2, poll_interval=0.1)
        watcher.until_registered()
        held = partial(stage.scalar, HELD_BY, pid=victim.pid)
        stage.until(held, what="it holds leases")
        victim.kill()
        stage.count("kills")
        began = time.monotonic()
        stage.until(partial(_is_none, held), seconds=5, what="its jobs are claimable")
        took = time.monotonic() - began
        stage.expect(took <= 2, f"its jobs are claimable again after {took:.2f} s, promised are 2")
        stage.open(f"go{number}")
        stage.until_ended()
        watcher.stop()
    stage.judge()


HELD_BY = """
    SELECT count(*) FROM pgqueue.leases JOIN pgqueue.workers ON id = worker_id WHERE pid = :pid
"""


def _is_none(count: Callable[[], int]) -> bool:
    return count() == 0


def _kill_while_they_pay(stage: Stage, size: Size, mode: str, **options: int) -> None:
    share = size.jobs // 4
    # Where few are killed, each death has to meet a handler between its write and its end.
    milliseconds = 8 if mode == "transaction" and size.faults < 100 else 1
    for task in (pay, pay_async, call):
        stage.enqueue(task.options(max_attempts=1000), [(milliseconds,)] * share)
    parents = stage.enqueue(
        pay_and_follow.options(max_attempts=1000), [(milliseconds,)] * (share // 2)
    )
    total = stage.unfinished() + len(parents)
    fleet = stage.fleet(mode, size.workers, concurrency=4, poll_interval=0.1, **options)
    for number in range(size.faults):
        # Not by what is left: while jobs enqueue others, that stays the same.
        stage.until_ended_are((number + 1) * total // (size.faults + 2))
        fleet.kill(fleet.some())
        fleet.add()
    stage.until_ended()
    fleet.stop()
    stage.judge(succeeded=total)
