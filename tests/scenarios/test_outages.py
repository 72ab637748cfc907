"""The database goes away and comes back: workers wait, go on, and nobody is taken for dead."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import worker_tasks
from sqlalchemy import text
from worker_rig import Rig, promised

from pgqueue.embedded import EmbeddedPostgres
from pgqueue.worker.liveness import FAST_GRACE

pytestmark = pytest.mark.journey

JOBS = 240
CUT = "the connection of its transaction has ended while it runs"
IN_A_HANDLER = """
    SELECT pid FROM pg_stat_activity WHERE state = 'idle in transaction'
    AND datname = current_database() AND backend_xid IS NOT NULL
"""
CONNECTIONS = 4
"""Those of a worker, beside its slots'."""
WAITING, AGAIN = "waiting for the database", "the database answers again, after "


@pytest.fixture
def server(server_directory: Path) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(server_directory, settings={"max_connections": "200"})
    server.start()
    yield server
    server.stop()


@pytest.mark.timed
@pytest.mark.parametrize(
    "task",
    [worker_tasks.heed_and_pay, worker_tasks.heed_and_pay_async, worker_tasks.heed_after_mistake],
)
def test_a_handler_hears_that_its_transaction_has_ended(
    database_url: str, tmp_path: Path, task: Any
) -> None:
    """It computes, and sends nothing by which it would be told, or does not heed what it is."""
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(concurrency=2)
        with rig.session() as session:
            first, second = (task.enqueue(session).id for _ in range(2))
            session.commit()
        rig.until_started(first, second)

        began = time.monotonic()
        [*_, (pid,)] = rig.rows(IN_A_HANDLER)
        rig.run("SELECT pg_terminate_backend(:pid)", pid=pid)
        rig.open("go")

        rig.until(lambda: rig.notes("cancelled"))
        [told] = rig.notes("cancelled")
        assert told["at"] - began < promised(2)
        rig.until_started(told["job"], attempt=2)
        assert worker.log.read_text().count(CUT) == 1
        with rig.session() as session:
            for job in (first, second):
                rig.queue.cancel(session, job)
            session.commit()
        rig.until_ended()
        assert rig.effects() == 0
        assert worker.terminate() == 0
        assert rig.check() == []


def _told(log: Path, words: str) -> int:
    return log.read_text().count(words)


def test_nobody_is_declared_dead_after_an_outage_of_seconds(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    with Rig(server.url, tmp_path) as rig:
        rig.queue.upgrade()
        workers = [rig.start() for _ in range(4)]
        server.crash()
        back_at = time.monotonic() + 6  # so long that whoever waits longer each time waits long
        rig.until(lambda: time.monotonic() > back_at)

        server.start()

        age = "SELECT max(clock_timestamp() - heartbeat_at) < '1 second' FROM pgqueue.workers"
        rig.until(lambda: rig.scalar(age), what="all workers beat")
        assert rig.declared_dead() == 0
        for worker in workers:
            # One of its connections may answer when another has ended: that is told too.
            rig.until(lambda log=worker.log: _told(log, AGAIN) >= _told(log, WAITING) > 0)  # type: ignore[misc]
            assert _told(worker.log, WAITING) == _told(worker.log, AGAIN) <= CONNECTIONS
        with rig.session() as session:
            worker_tasks.quick.enqueue_many(session, [()] * 50)
            session.commit()
        rig.until_ended()
        assert [worker.terminate() for worker in workers] == [0] * 4
        assert rig.check() == []


def test_an_outage_is_not_told_for_each_job_that_was_claimed_before(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    with Rig(server.url, tmp_path) as rig:
        rig.queue.upgrade()
        worker = rig.start(concurrency=8)
        with rig.session() as session:
            worker_tasks.pay.enqueue_many(session, [(1,)] * 2000)
            session.commit()
        rig.until(lambda: rig.unfinished() <= 1800)

        server.crash()  # each slot goes on with what it has claimed
        rig.until(lambda: "waiting for the database" in worker.log.read_text())
        server.start()
        rig.until_ended()

        said = worker.log.read_text()
        # The server's processes end one after the other: one of the worker's connections may answer
        # when another has ended, and the 8 slots had claimed many jobs.
        assert said.count("waiting for the database") <= CONNECTIONS
        assert "no connection for its handler" not in said
        assert rig.check() == []


def test_a_worker_that_finds_no_server_waits_for_it(server_directory: Path, tmp_path: Path) -> None:
    with EmbeddedPostgres(server_directory) as server, Rig(server.url, tmp_path) as rig:
        rig.queue.upgrade()
        with rig.session() as session:
            job = worker_tasks.quick.enqueue(session).id
            session.commit()
        server.crash()
        worker = rig.start(waits=False)
        rig.until(lambda: "waiting for the database" in worker.log.read_text())

        server.start()

        rig.until_ended(job)
        assert worker.terminate() == 0
        assert rig.check() == []


def test_a_worker_that_finds_no_server_can_be_stopped(
    server_directory: Path, tmp_path: Path
) -> None:
    with EmbeddedPostgres(server_directory) as server, Rig(server.url, tmp_path) as rig:
        rig.queue.upgrade()
        server.crash()
        worker = rig.start(waits=False)
        rig.until(lambda: "waiting for the database" in worker.log.read_text())

        assert worker.terminate() == 0

        server.start()
        assert rig.check() == []


def test_a_worker_survives_the_end_of_each_of_its_connections(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(concurrency=2)
        with rig.session() as session:
            once = worker_tasks.pay.enqueue(session).id
            session.commit()
        rig.until_ended(once)

        for round_ in range(2):
            for backend in rig.backends(worker):
                rig.run("SELECT pg_terminate_backend(:pid)", pid=backend)
                with rig.session() as session:
                    jobs = [
                        task.enqueue(session).id
                        for task in (worker_tasks.pay, worker_tasks.pay_async)
                    ]
                    session.commit()
                rig.until_ended(*jobs)
            assert round_ == 0 or worker.is_running

        assert rig.declared_dead() == 0
        assert rig.each_success_has_one_effect()
        assert worker.terminate() == 0
        assert rig.check() == []


def test_handlers_that_use_up_the_pool_do_not_starve_the_worker(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(engine={"pool_size": 1, "max_overflow": 0})
        with rig.session() as session:
            hog = worker_tasks.hog_the_pool.enqueue(session, "go").id
            session.commit()
        rig.until_started(hog)

        with rig.raw() as connection:
            for backend in rig.scalar(
                "SELECT array_agg(pid) FROM pg_stat_activity"
                " WHERE split_part(application_name, ' ', 1) = :name AND state = 'idle'",
                name=worker.name,
            ):
                connection.exec_driver_sql(f"SELECT pg_terminate_backend({backend})")
        rig.start()

        with rig.session() as session:
            job = worker_tasks.quick.enqueue(session).id
            session.commit()
        rig.until_ended(job)
        ends_at = time.monotonic() + 3
        rig.until(lambda: time.monotonic() > ends_at or rig.declared_dead())
        assert rig.declared_dead() == 0
        rig.open("go")
        rig.until_ended()
        assert worker.terminate() == 0
        assert rig.check() == []


@pytest.mark.parametrize("task", [worker_tasks.pay, worker_tasks.pay_async])
def test_a_connection_that_died_in_the_pool_costs_no_attempt(
    database_url: str, tmp_path: Path, task: Any
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start()
        with rig.session() as session:
            first = task.enqueue(session).id
            session.commit()
        rig.until_ended(first)
        with rig.raw() as connection:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE split_part(application_name, ' ', 1) = :name AND state = 'idle'"
                    " AND datname = current_database()"
                ),
                {"name": worker.name},
            )

        with rig.session() as session:
            job = task.options(max_attempts=1).enqueue(session).id
            session.commit()

        rig.until_ended(job)
        assert rig.outcome(job) == "succeeded"
        assert rig.bad_attempts() == []
        assert rig.check() == []


def test_a_worker_whose_beats_are_refused_is_not_taken_for_dead(
    database_url: str, tmp_path: Path
) -> None:
    """As by a full disk.  It is alive, and the lock on its connection says so."""
    age = "SELECT clock_timestamp() - heartbeat_at > :age FROM pgqueue.workers WHERE pid = :pid"
    with Rig(database_url, tmp_path) as rig:
        refused, other = rig.start(), rig.start()
        rig.until(lambda: rig.scalar("SELECT count(*) FROM pgqueue.workers") == 2)
        rig.run(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" IF OLD.pid = {refused.pid} AND NEW.dead_at IS NULL THEN"
            " RAISE EXCEPTION 'no space left' USING ERRCODE = 'disk_full'; END IF;"
            " RETURN NEW; END $$"
        )
        rig.run(
            "CREATE TRIGGER refuse BEFORE UPDATE ON pgqueue.workers"
            " FOR EACH ROW EXECUTE FUNCTION refuse()"
        )

        rig.until(lambda: rig.scalar(age, pid=refused.pid, age=2 * FAST_GRACE))
        rig.run("DROP TRIGGER refuse ON pgqueue.workers")
        rig.until(lambda: not rig.scalar(age, pid=refused.pid, age=FAST_GRACE))

        assert "heartbeat: the database refuses: no space left" in refused.log.read_text()
        assert rig.declared_dead() == 0
        assert [worker.terminate() for worker in (refused, other)] == [0, 0]
