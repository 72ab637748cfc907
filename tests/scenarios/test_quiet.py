"""A quiet worker: it claims nothing more, ends what it runs, and lives until it is stopped or
resumed."""

import time
from pathlib import Path
from uuid import UUID, uuid4

import pytest
import worker_tasks
from worker_rig import Rig, WorkerProgram

from pgqueue import ArgumentsError

pytestmark = pytest.mark.journey


def test_it_ends_its_jobs_and_leaves_the_others_to_others(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(poll_interval=0.2)
        with rig.session() as session:
            running = worker_tasks.wait.enqueue(session, "mine").id
            session.commit()
        rig.until_started(running)

        _make_quiet(rig, worker)
        with rig.session() as session:
            left = worker_tasks.quick.enqueue(session).id
            session.commit()
        rig.open("mine")
        rig.until_ended(running)
        time.sleep(0.5)  # that nothing happens can only be seen by waiting for it

        assert rig.outcome(running) == "succeeded"
        assert rig.notes("start", job=left) == []
        assert rig.is_registered(worker)
        rig.start(poll_interval=0.2)
        rig.until_ended(left)
        assert worker.terminate() == 0
        assert rig.check() == []


def test_it_claims_again_when_this_is_undone(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(poll_interval=0.2)
        _make_quiet(rig, worker)
        rig.run("UPDATE pgqueue.workers SET dead_at = now()")  # it keeps its queues beyond this
        rig.until(lambda: rig.is_registered(worker), what="it is back under a new id")
        alive = "SELECT id FROM pgqueue.workers WHERE dead_at IS NULL"
        with rig.session() as session:
            left = worker_tasks.quick.enqueue(session).id
            session.commit()
        with rig.session() as session, session.begin():
            assert rig.queue.unquiet(session, UUID(str(rig.scalar(alive)))) is True

        rig.until_ended(left)

        assert rig.outcome(left) == "succeeded"
        assert worker.terminate() == 0


def test_a_worker_that_was_declared_dead_stays_quiet(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(poll_interval=0.2)
        _make_quiet(rig, worker)

        rig.run("UPDATE pgqueue.workers SET dead_at = now()")
        rig.until(lambda: rig.is_registered(worker), what="it is back under a new id")

        alive = "SELECT queues FROM pgqueue.workers WHERE dead_at IS NULL"
        assert rig.scalar(alive) == []


def test_a_worker_that_does_not_live_cannot_be_made_quiet(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig, rig.session() as session:
        for change in (rig.queue.quiet, rig.queue.unquiet):
            assert change(session, uuid4()) is False
            with pytest.raises(ArgumentsError, match="a UUID, not str"):
                change(session, "7")  # type: ignore[arg-type]


def _make_quiet(rig: Rig, worker: WorkerProgram) -> None:
    """Until the worker knows: it has sent another heartbeat after the one that has read it."""
    id: UUID = rig.scalar("SELECT id FROM pgqueue.workers WHERE pid = :pid", pid=worker.pid)
    with rig.session() as session:
        assert rig.queue.quiet(session, id) is True
        session.commit()
    beat = "SELECT heartbeat_at FROM pgqueue.workers WHERE id = :id"
    for _ in range(3):
        before = rig.scalar(beat, id=id)
        rig.until(lambda before=before: rig.scalar(beat, id=id) != before)  # type: ignore[misc]
