"""A worker that comes back from the dead changes nothing, and goes on as another one."""

import signal
import time
from pathlib import Path
from typing import Any

import chores
import freezers
import pytest
from sqlalchemy import text
from worker_rig import Rig, WorkerProgram

from pgqueue.repository.transactions import AFTER_HANDLER

pytestmark = pytest.mark.journey

# The rescuer waits two seconds, not thirty, for a worker whose connection is still open.
HASTY: dict[str, Any] = {"set_spans": {"pgqueue.worker.liveness:SLOW_GRACE": 2.0}}


@pytest.mark.battery  # as a chaos scenario
@pytest.mark.parametrize("task", [chores.wait, chores.wait_and_pay, chores.wait_async])
def test_the_late_result_of_a_zombie_changes_nothing(
    database_url: str, tmp_path: Path, task: Any
) -> None:
    with Rig(database_url, tmp_path) as rig:
        zombie = rig.start(**HASTY)
        with rig.session() as session:
            job = task.enqueue(session, "go").id
            session.commit()
        rig.until_started(job)
        zombie.send(signal.SIGSTOP)
        rescuer = rig.start(**HASTY)
        rig.until_started(job, attempt=2)
        rig.open("go")
        rig.until_ended(job)
        before = rig.rows("SELECT * FROM pgqueue.jobs WHERE id = :id", id=job)
        assert rescuer.terminate() == 0

        zombie.send(signal.SIGCONT)

        rig.until(lambda: len(rig.notes("end", job=job)) == 2, what="the zombie's handler ends")
        _runs_new_jobs_under_a_new_name(rig, zombie)
        assert rig.rows("SELECT * FROM pgqueue.jobs WHERE id = :id", id=job) == before
        assert rig.bad_attempts(job) == ["crashed"]
        assert rig.effects(job) == (1 if task is chores.wait_and_pay else 0)
        assert rig.check() == []


def test_a_worker_frozen_between_its_settle_and_its_commit_does_not_keep_its_lease(
    database_url: str, tmp_path: Path
) -> None:
    sooner = AFTER_HANDLER.replace("= 20000", "= 1000")  # the grace below is shorter, too
    hasty = {
        "modules": ["freezers"],
        "set": {"pgqueue.worker.pool_transaction:AFTER_HANDLER": sooner},
        **HASTY,
    }
    with Rig(database_url, tmp_path) as rig:
        zombie = rig.start(**hasty)
        with rig.session() as session:
            job = freezers.pay_and_freeze.enqueue(session).id
            session.commit()
        rig.until(zombie.is_stopped, what="it stands still")
        rescuer = rig.start(**hasty)

        rig.until_started(job, attempt=2)
        rig.until_ended(job)
        zombie.send(signal.SIGCONT)
        rig.open("thaw")

        assert rig.outcome(job) == "succeeded"
        assert rig.bad_attempts(job) == ["crashed"]
        assert rig.effects(job) == 1
        assert [worker.terminate() for worker in (zombie, rescuer)] == [0, 0]
        assert rig.check() == []


@pytest.mark.battery  # as a chaos scenario
def test_a_zombie_settles_nothing_while_its_job_runs_elsewhere(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        zombie = rig.start()  # in no haste to judge the other
        with rig.session() as session:
            jobs = [chores.wait_and_pay.enqueue(session, "first").id for _ in range(2)]
            jobs += [chores.wait.enqueue(session, "first").id for _ in range(2)]
            session.commit()
        rig.until_started(*jobs)
        zombie.send(signal.SIGSTOP)
        rescuer = rig.start(**HASTY)
        rig.until_started(*jobs, attempt=2)
        rescuer.send(signal.SIGSTOP)  # inside its handlers, with its leases
        rig.open("first")

        zombie.send(signal.SIGCONT)

        rig.until(lambda: len(rig.notes("end")) == 4, what="the zombie's handlers end")
        rig.until(lambda: rig.is_registered(zombie), what="the zombie has a new name")
        assert rig.unfinished() == 4
        assert rig.effects() == 0
        rescuer.send(signal.SIGCONT)
        rig.until_ended()
        assert rig.each_success_has_one_effect() is False  # two of them write none
        assert rig.effects() == 2
        assert rig.check() == []


def test_a_worker_claims_nothing_under_a_name_that_was_declared_dead(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(poll_interval=0.02)
        for number in range(4):
            with rig.session() as session:  # the worker sees both at once, and hears of one later
                session.execute(text("UPDATE pgqueue.workers SET dead_at = clock_timestamp()"))
                job = chores.wait.enqueue(session, f"go-{number}").id
                session.commit()

            owner = rig.until(lambda job=job: _owner(rig, job))  # type: ignore[misc]

            dead = "SELECT count(*) FROM pgqueue.workers WHERE id = :id AND dead_at IS NOT NULL"
            assert rig.scalar(dead, id=owner) == 0
            rig.open(f"go-{number}")
            rig.until_ended(job)
        assert rig.bad_attempts() == []
        assert worker.terminate() == 0
        assert rig.check() == []


def test_a_worker_frozen_for_less_than_the_grace_goes_on_as_before(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        frozen = rig.start()
        rig.start()
        with rig.session() as session:
            jobs = [chores.wait.enqueue(session, "go").id for _ in range(4)]
            session.commit()
        rig.until_started(*jobs)
        frozen.send(signal.SIGSTOP)
        woken_at = time.monotonic() + 2.5  # longer than the fast grace, which is for lost locks
        rig.until(lambda: time.monotonic() > woken_at)

        frozen.send(signal.SIGCONT)

        rig.open("go")
        rig.until_ended()
        assert rig.declared_dead() == 0
        assert rig.bad_attempts() == []
        assert rig.check() == []


def test_nobody_is_declared_dead_by_one_who_has_not_looked_on_without_a_break(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        silent = rig.start()
        judge = rig.start()
        silent.send(signal.SIGSTOP)
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
        silent.send(signal.SIGCONT)
        rig.until(lambda: rig.is_registered(silent))
        assert rig.check() == []


@pytest.mark.battery  # as a chaos scenario
def test_two_workers_frozen_in_turns_do_every_job_once(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        with rig.session() as session:
            chores.pay.options(max_attempts=1000).enqueue_many(session, [(5,)] * 600)
            session.commit()
        hasty = {"pgqueue.worker.liveness:SLOW_GRACE": 1.0}
        workers = [rig.start(set_spans=hasty, concurrency=2) for _ in range(2)]

        for turn in range(4):
            frozen = workers[turn % 2]
            frozen.send(signal.SIGSTOP)
            rig.until(lambda turn=turn: rig.declared_dead() > turn)  # type: ignore[misc]
            frozen.send(signal.SIGCONT)
            rig.until(lambda frozen=frozen: rig.is_registered(frozen))  # type: ignore[misc]

        rig.until_ended()
        assert rig.outcomes() == {"succeeded": 600}
        assert rig.each_success_has_one_effect()
        assert rig.check() == []


def _owner(rig: Rig, job: int) -> Any:
    leases = rig.rows("SELECT worker_id FROM pgqueue.leases WHERE target_id = :id", id=job)
    return leases[0][0] if leases else None


def _runs_new_jobs_under_a_new_name(rig: Rig, zombie: WorkerProgram) -> None:
    with rig.session() as session:
        job = chores.pay.enqueue(session).id
        session.commit()
    rig.until_ended(job)
    names = rig.rows("SELECT id FROM pgqueue.workers WHERE pid = :pid", pid=zombie.pid)
    assert len(names) == 2
    assert rig.notes("start", job=job)[0]["pid"] == zombie.pid
    assert rig.effects(job) == 1
