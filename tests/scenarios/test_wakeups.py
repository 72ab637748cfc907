"""Wake-ups are hints: with them a job starts at once, without them it starts all the same."""

import itertools
import time
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
import worker_tasks
from sqlalchemy import make_url
from worker_rig import PATIENCE, Rig, WorkerProgram, promised

from pgqueue.repository.tables import CHANNEL, SLEEPERS
from pgqueue.worker.claiming.sweeps import LATEST_SWEEP

pytestmark = pytest.mark.journey

FOREVER = 600.0
"""Seconds between polls: what starts sooner was woken."""


@pytest.mark.timed
def test_a_sleeping_worker_starts_a_new_job_in_less_than_a_second(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start(poll_interval=FOREVER)

        took = []
        for _ in range(5):
            _until_asleep(rig)
            began = time.monotonic()
            with rig.session() as session:
                job = worker_tasks.quick.enqueue(session).id
                session.commit()
            took.append(rig.until_started(job, seconds=promised(1)) - began)

        print("picked up in ms:", [round(1000 * seconds, 1) for seconds in took])
        assert min(took) < promised(0.2)
        rig.until_ended()
        assert rig.check() == []


def test_a_sleeping_worker_starts_a_job_whose_transaction_stayed_open_a_while(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start(poll_interval=FOREVER)
        _until_asleep(rig)
        with rig.session() as session:
            job = worker_tasks.quick.enqueue(session).id
            session.flush()
            _let_pass(rig, 2.0)
            assert rig.notes("start") == []

            session.commit()

        rig.until_started(job)
        rig.until_ended()
        assert rig.check() == []


@pytest.mark.timed
def test_a_job_enqueued_before_the_worker_slept_and_committed_after_is_found_in_seconds(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        with rig.session() as session:
            job = worker_tasks.quick.enqueue(session).id  # nobody sleeps: it notifies nobody
            started_at = time.monotonic()
            rig.start(poll_interval=FOREVER)
            _until_asleep(rig)
            _let_pass(rig, 1.0)

            session.commit()
            asleep = time.monotonic() - started_at

        # The sleep doubles: at most as long again.  A sweep that took long is not cheap to repeat.
        rig.until_started(job, seconds=promised(2 * asleep + LATEST_SWEEP + 1))
        rig.until_ended()
        assert rig.check() == []


def test_the_follow_up_of_a_failed_job_notifies_as_an_enqueue_does(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig, _listening(database_url) as heard:
        with rig.session() as session:
            worker_tasks.fail.enqueue_many(session, [()] * 3)
            session.commit()
        heard.execute("SELECT pg_advisory_lock_shared(%s)", [SLEEPERS])  # for other queues
        rig.start()

        rig.until(lambda: rig.outcomes().get("failed") == 3, what="all jobs have failed")

        assert {note.payload for note in heard.notifies(timeout=10, stop_after=1)} == {"enqueued"}


def test_nobody_is_notified_while_nobody_sleeps(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig, _listening(database_url) as heard:
        with rig.session() as session:
            worker_tasks.wait.enqueue(session, "go")
            session.commit()
        worker = rig.start(concurrency=1)
        rig.until(lambda: rig.notes("start"))
        rig.until(lambda: not _is_asleep(rig))

        with rig.session() as session:
            worker_tasks.quick.enqueue(session)
            session.add(worker_tasks.quick.job())
            worker_tasks.quick.enqueue_many(session, [()] * 3)
            session.commit()

        assert list(heard.notifies(timeout=0.2)) == []
        rig.open("go")
        rig.until_ended()
        assert worker.terminate() == 0
        assert rig.check() == []


def test_a_sleeper_is_notified_once_for_each_transaction(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig, _listening(database_url) as heard:
        rig.start(poll_interval=FOREVER)
        _until_asleep(rig)
        list(heard.notifies(timeout=0.1))

        with rig.session() as session:
            worker_tasks.quick.enqueue(session)
            session.add(worker_tasks.quick.job())
            worker_tasks.quick.enqueue_many(session, [()] * 300)
            session.commit()

        notes = list(heard.notifies(timeout=PATIENCE, stop_after=1)) + list(
            heard.notifies(timeout=0.2)
        )
        assert {note.payload for note in notes} == {"enqueued"}
        assert len(notes) == 1
        rig.until_ended()
        assert rig.check() == []


def test_a_worker_whose_listening_connection_has_ended_soon_hears_again(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(poll_interval=1.0, set={"pgqueue.database.notifications:LATER": 0.3})
        _until_asleep(rig)

        _end_listening(rig, worker)

        rig.until(lambda: _is_asleep(rig), what="it holds the sleepers' lock again")
        with rig.session() as session:
            job = worker_tasks.quick.enqueue(session).id
            session.commit()
        rig.until_ended(job)
        assert rig.check() == []


@pytest.mark.timed
def test_a_delayed_job_starts_at_its_time(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start(poll_interval=FOREVER)
        _until_asleep(rig)

        took = []
        for delay in (0.7, 0.3):
            began = time.monotonic()
            later = worker_tasks.quick.options(delay=timedelta(seconds=delay))
            with rig.session() as session:
                job = later.enqueue(session).id
                session.commit()
            took.append(rig.until_started(job) - began)

        assert 0.69 < took[0] < promised(2.5)
        assert 0.29 < took[1] < promised(2.1)
        rig.until_ended()
        assert rig.check() == []


@pytest.mark.timed
def test_a_retry_does_not_wait_for_the_poll(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start(poll_interval=FOREVER)
        _until_asleep(rig)

        with rig.session() as session:
            job = worker_tasks.fail_twice.enqueue(session).id  # retried after 0.2 s
            session.commit()

        rig.until_started(job, attempt=3)
        rig.until_ended()
        starts = [note["at"] for note in rig.notes("start", job=job)]
        gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
        assert all(0.19 < gap < promised(1.2) for gap in gaps)
        assert rig.check() == []


def test_what_a_stopped_worker_gives_back_is_run_by_a_sleeping_one(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        stopped = rig.start(poll_interval=FOREVER, grace=0)
        _until_asleep(rig)
        with rig.session() as session:
            job = worker_tasks.wait.enqueue(session, "go").id
            session.commit()
        rig.until_started(job)
        rig.start(poll_interval=FOREVER)
        _until_asleep(rig)
        _let_pass(rig, 1.0)

        assert stopped.terminate() == 0

        rig.until(lambda: len(rig.notes("start", job=job)) == 2)
        rig.open("go")
        rig.until_ended()
        assert rig.bad_attempts() == ["interrupted"]
        assert rig.check() == []


def _sleepers(rig: Rig) -> list[int]:
    """The backends that hold the sleepers' lock."""
    statement = """
        SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted
            AND ((classid::bigint << 32) | objid::bigint) = :key
    """
    return [row[0] for row in rig.rows(statement, key=SLEEPERS)]


def _is_asleep(rig: Rig) -> bool:
    return bool(_sleepers(rig))


def _until_asleep(rig: Rig) -> None:
    rig.until(lambda: _is_asleep(rig), what="a worker sleeps")


def _end_listening(rig: Rig, worker: WorkerProgram) -> None:
    rig.until(lambda: _is_asleep(rig), what="it sleeps again")  # it looks around now and then
    [sleeper] = _sleepers(rig)
    assert sleeper in rig.backends(worker)
    rig.run("SELECT pg_terminate_backend(:pid, 5000)", pid=sleeper)


def _let_pass(rig: Rig, seconds: float) -> None:
    """Time itself is the condition: the worker must have slept so long."""
    over_at = time.monotonic() + seconds
    rig.until(lambda: time.monotonic() > over_at)


def _listening(url: str) -> "psycopg.Connection[tuple[object, ...]]":
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    connection = psycopg.connect(plain, autocommit=True)
    connection.execute(f"LISTEN {CHANNEL}".encode())
    return connection
