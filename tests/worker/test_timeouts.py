"""A handler past its timeout loses its job; the worker keeps its slot."""

from pathlib import Path
from typing import Any

import chores
import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError
from worker_rig import MODES, Rig

from chaos.interleavings.logical_workers import logical_workers, worker_settings
from pgqueue.repository import Locked

pytestmark = pytest.mark.journey

SEEN = """
    SELECT m.priority, m.run_at::text, m.id, m.target_id, m.queue, m.task, '{}', 1,
           m.attempt, m.crashes, l.message_id, l.attempt, l.held
    FROM pgqueue.message_queue m JOIN pgqueue.leases l USING (target_id)
"""
"""What a claim finds of the only message there is."""
CANCELLED = text("""
    WITH gone AS (DELETE FROM pgqueue.message_queue),
    job AS (
        UPDATE pgqueue.jobs SET outcome = 'cancelled', finished_at = clock_timestamp(),
            held_unique_key = NULL
        WHERE id = :job RETURNING id, outcome, queue, task, finished_at
    )
    INSERT INTO pgqueue.dead_letters (job_id, outcome, queue, task, finished_at) SELECT * FROM job
""")
FIRST = text("SELECT id FROM pgqueue.message_queue FOR UPDATE")
TRIES = 10
OVERRUNS = [chores.overrun, chores.overrun_and_pay]
ASYNC_OVERRUNS = [chores.overrun_async, chores.overrun_and_pay_async]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("task", OVERRUNS)
def test_a_thread_past_its_timeout_is_told_and_its_slot_runs_other_jobs(
    database_url: str, tmp_path: Path, mode: str, task: Any
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(mode, concurrency=2)
        once = task.options(max_attempts=1)
        with rig.session() as session:
            job = once.enqueue(session, "go").id
            session.commit()

        rig.until_ended(job)

        assert (rig.outcome(job), rig.attempts(job)) == ("failed", 1)
        assert rig.bad_attempts(job) == ["timeout"]
        rig.until(lambda: rig.notes("cancelled", job=job), what="the handler is told")
        with rig.session() as session:
            both_slots = [chores.wait.enqueue(session, "both").id for _ in range(2)]
            session.commit()
        rig.until_started(*both_slots)
        rig.open("both")
        rig.until_ended(*both_slots)
        rig.open("go")
        rig.until(lambda: rig.notes("end", job=job))
        _still_works(rig)
        assert rig.outcome(job) == "failed"
        assert rig.bad_attempts() == ["timeout"]
        assert rig.effects(job) == 0
        assert worker.terminate() == 0
        assert rig.check() == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("task", [*OVERRUNS, *ASYNC_OVERRUNS])
def test_a_job_that_timed_out_is_tried_again(
    database_url: str, tmp_path: Path, mode: str, task: Any
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(mode, concurrency=4)
        arguments = ("go",) if task in OVERRUNS else ()
        rig.open("go")  # a thread ends soon after it is told

        with rig.session() as session:
            job = task.enqueue(session, *arguments).id
            session.commit()

        rig.until_ended(job)
        assert (rig.outcome(job), rig.attempts(job)) == ("failed", 2)
        assert set(rig.bad_attempts(job)) == {"timeout"}
        [[error]] = rig.rows("SELECT last_error FROM pgqueue.jobs WHERE id = :job", job=job)
        assert "the handler ran longer than 0:00:00.3" in error
        assert len(rig.notes("start", job=job)) == 2
        _still_works(rig)
        assert rig.effects(job) == 0
        assert worker.terminate() == 0
        assert rig.check() == []


def test_whoever_meets_the_message_first_cannot_take_a_timeout_for_a_crash(
    database_url: str, tmp_path: Path
) -> None:
    """Another worker waits for the message, so that it has it before the one that ends T."""
    workers = worker_settings(database_url, lock_timeout="3s")
    with Rig(database_url, tmp_path) as rig, logical_workers(workers, 1) as [greedy]:
        rig.start("transaction", concurrency=TRIES + 1)
        job, seen = _first_at_the_message(rig, greedy.transaction)

        with pytest.raises(OperationalError, match="lock timeout"):
            greedy.stamp(Locked(*seen))
        greedy.transaction.rollback()

        rig.until_ended(job)
        assert (rig.outcome(job), rig.bad_attempts(job)) == ("failed", ["timeout"])
        rig.open("go")
        assert rig.check() == []
    workers.dispose()


def _first_at_the_message(rig: Rig, transaction: Connection) -> tuple[int, Any]:
    """Have the message of a job at its timeout, before the one that settles it; and the job."""
    for _ in range(TRIES):  # who of the two is the first to wake is the system's matter
        with rig.session() as session:
            job = chores.overrun_late.options(max_attempts=1).enqueue(session, "go").id
            session.commit()
        rig.until_started(job)
        seen = rig.rows(SEEN)
        if seen and transaction.execute(FIRST).all():
            return job, seen[0]
        transaction.rollback()
        rig.until_ended(job)
    raise AssertionError("the worker was first each time")


def test_a_job_that_is_cancelled_while_its_timeout_is_settled_leaves_no_lease(
    database_url: str, tmp_path: Path
) -> None:
    workers = worker_settings(database_url)
    with Rig(database_url, tmp_path) as rig, logical_workers(workers, 1) as [operator]:
        rig.start("transaction", concurrency=TRIES + 1)
        job, _ = _first_at_the_message(rig, operator.transaction)

        # Its transaction has ended, and nobody has settled it.
        operator.transaction.execute(CANCELLED, {"job": job})
        operator.transaction.commit()

        rig.until(lambda: rig.scalar("SELECT count(*) FROM pgqueue.leases") == 0)
        assert rig.outcome(job) == "cancelled"
        rig.open("go")
        assert rig.check() == []
    workers.dispose()


@pytest.mark.parametrize("mode", MODES)
def test_an_async_handler_that_blocks_its_loop_past_its_timeout_loses_its_job(
    database_url: str, tmp_path: Path, mode: str
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start(mode)
        with rig.session() as session:
            job = chores.block_past_timeout.enqueue(session, "go").id
            session.commit()

        rig.until_ended(job)

        assert (rig.outcome(job), rig.bad_attempts(job)) == ("failed", ["timeout"])
        rig.open("go")
        rig.until(lambda: rig.notes("end", job=job))
        _still_works(rig)
        assert rig.outcome(job) == "failed"
        assert rig.check() == []


@pytest.mark.parametrize("mode", MODES)
def test_an_overdue_job_needs_no_connection_of_the_application_to_end(
    database_url: str, tmp_path: Path, mode: str
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start(mode, pool_size=1)
        with rig.session() as session:
            hog = chores.hog_the_pool.enqueue(session, "hog").id
            session.commit()
        rig.until_started(hog)
        with rig.session() as session:
            job = chores.overrun.options(max_attempts=1).enqueue(session, "go").id
            session.commit()

        rig.until_ended(job)

        assert (rig.outcome(job), rig.bad_attempts(job)) == ("failed", ["timeout"])
        rig.open("hog")
        rig.open("go")
        rig.until_ended()
        assert rig.check() == []


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_whose_threads_are_all_stuck_ends_with_an_error(
    database_url: str, tmp_path: Path, mode: str
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(mode, concurrency=2)
        with rig.session() as session:
            stuck = [
                chores.overrun.options(max_attempts=1).enqueue(session, "never").id
                for _ in range(2)
            ]
            session.commit()

        code = worker.exit_code()

        assert code == 1
        assert "TooManyStuck" in worker.log.read_text()
        rig.start(mode)
        rig.until_ended(*stuck)
        assert [rig.bad_attempts(job) for job in stuck] == [["timeout"]] * 2
        _still_works(rig)
        assert rig.check() == []


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_ends_over_stuck_threads_lets_the_others_finish(
    database_url: str, tmp_path: Path, mode: str
) -> None:
    with Rig(database_url, tmp_path) as rig:
        worker = rig.start(mode, concurrency=2, grace=60)
        jobs = []
        for task in (chores.overrun, chores.wait, chores.overrun):
            with rig.session() as session:
                jobs.append(task.options(max_attempts=1).enqueue(session, "go").id)
                session.commit()
            rig.until_started(jobs[-1])
        stuck_first, running, stuck_last = jobs
        rig.until(lambda: "stopping" in worker.log.read_text())

        rig.open("go")

        assert worker.exit_code() == 1
        assert "TooManyStuck" in worker.log.read_text()
        assert (rig.outcome(running), rig.attempts(running)) == ("succeeded", 1)
        assert rig.bad_attempts(stuck_first) == ["timeout"]
        assert rig.bad_attempts(stuck_last) == ["timeout"]
        assert rig.check() == []


def _still_works(rig: Rig) -> None:
    with rig.session() as session:
        jobs = [chores.pay.enqueue(session).id, chores.pay_async.enqueue(session).id]
        session.commit()
    rig.until_ended(*jobs)
    assert [rig.effects(job) for job in jobs] == [1, 1]
