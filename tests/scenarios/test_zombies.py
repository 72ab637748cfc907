"""A worker that comes back from the dead changes nothing, and goes on as another one."""

import time
from pathlib import Path
from typing import Any

import freezers
import pytest
import worker_tasks
from sqlalchemy import text
from worker_rig import Rig

from pgqueue.repository.transactions import AFTER_SUCCESS

pytestmark = pytest.mark.journey

# The rescuer waits two seconds, not thirty, for a worker whose connection is still open.
HASTY: dict[str, Any] = {"slow_grace": 2.0}


def test_a_worker_frozen_between_its_settle_and_its_commit_does_not_keep_its_lease(
    database_url: str, tmp_path: Path
) -> None:
    sooner = AFTER_SUCCESS.replace("= 20000", "= 1000")  # the grace below is shorter, too
    hasty = {
        "modules": ["freezers"],
        "set": {"pgqueue.worker.pool_transaction:AFTER_SUCCESS": sooner},
        **HASTY,
    }
    with Rig(database_url, tmp_path) as rig:
        zombie = rig.start(**hasty)
        with rig.session() as session:
            job = freezers.pay_and_freeze.enqueue(session).id
            session.commit()
        rig.until(lambda: zombie.stands_still, what="it stands still")
        rescuer = rig.start(**hasty)

        rig.until_started(job, attempt=2)
        rig.until_ended(job)
        zombie.thaw()
        rig.open("thaw")

        assert rig.outcome(job) == "succeeded"
        assert rig.bad_attempts(job) == ["crashed"]
        assert rig.effects(job) == 1
        assert [worker.terminate() for worker in (zombie, rescuer)] == [0, 0]
        assert rig.check() == []


def test_a_worker_claims_nothing_under_a_name_that_was_declared_dead(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(poll_interval=0.02)
        for number in range(4):
            with rig.session() as session:  # the worker sees both at once, and hears of one later
                session.execute(text("UPDATE pgqueue.workers SET dead_at = clock_timestamp()"))
                job = worker_tasks.wait.enqueue(session, f"go-{number}").id
                session.commit()

            owner = rig.until(lambda job=job: _owner(rig, job))  # type: ignore[misc]

            dead = "SELECT count(*) FROM pgqueue.workers WHERE id = :id AND dead_at IS NOT NULL"
            assert rig.scalar(dead, id=owner) == 0
            rig.open(f"go-{number}")
            rig.until_ended(job)
        assert rig.bad_attempts() == []
        assert worker.terminate() == 0
        assert rig.check() == []


def test_nobody_is_declared_dead_by_one_who_has_not_looked_on_without_a_break(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        silent = rig.start()
        judge = rig.start()
        silent.freeze()
        lock = (
            "SELECT pg_terminate_backend(backend_pid, 5000) FROM pgqueue.workers WHERE pid = :pid"
        )
        rig.run(lock, pid=silent.pid)

        for _ in range(6):
            over_at = time.monotonic() + 0.7  # less than half of the grace
            rig.until(lambda over_at=over_at: time.monotonic() > over_at)  # type: ignore[misc]
            for backend in rig.backends(judge):
                rig.run("SELECT pg_terminate_backend(:pid)", pid=backend)

        assert rig.declared_dead() == 0
        rig.until(rig.declared_dead, what="left in peace, it sees the silence for the whole grace")
        silent.thaw()
        rig.until(lambda: rig.is_registered(silent))
        assert rig.check() == []


def _owner(rig: Rig, job: int) -> Any:
    leases = rig.rows("SELECT worker_id FROM pgqueue.leases WHERE target_id = :id", id=job)
    return leases[0][0] if leases else None
