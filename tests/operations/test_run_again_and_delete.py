"""Jobs that have ended run again as copies, and jobs that do not run are deleted."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import LogicalWorker, enqueue, stored, violations
from pgqueue import (
    DuplicateJob,
    Job,
    JobContext,
    JobNotFound,
    JobStatus,
    Limit,
    OptionError,
    PgQueue,
    Selection,
    Unique,
    Worker,
)
from pgqueue.tables import Blocked, JobAttempt, MessageQueue, OperatorAction, WaitingMessage

HOUR = timedelta(hours=1)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def run(queue: PgQueue) -> None:
    Worker(queue).run_until_empty(timeout=60)


def status_of(queue: PgQueue, job_id: int) -> JobStatus:
    with queue.session() as session:
        return session.get_one(Job, job_id).status


def run_again(queue: PgQueue, job_id: int) -> int:
    with queue.session() as session, session.begin():
        return queue.run_again(session, job_id)


def delete(queue: PgQueue, job_id: int) -> None:
    with queue.session() as session, session.begin():
        queue.delete(session, job_id)


def delete_object(queue: PgQueue, job_id: int) -> None:
    with queue.session() as session, session.begin():
        session.delete(session.get_one(Job, job_id))


class TestRunAgain:
    def test_a_copy_runs_and_the_old_job_stays(self, queue: PgQueue, engine: Engine) -> None:
        ran: list[tuple[int, Any]] = []

        @queue.task(name="note")
        def note(ctx: JobContext, n: int) -> int:
            ran.append((n, ctx.meta))
            return n

        options = note.options(queue="notes", priority=2, max_attempts=3, tags=["a"])
        job = options.options(meta={"b": 1}, timeout=HOUR).delay(7)
        Worker(queue, ["notes"]).run_until_empty(timeout=60)
        [before] = stored(engine, Job)

        copy_id = run_again(queue, job.id)
        Worker(queue, ["notes"]).run_until_empty(timeout=60)

        old, copy = sorted(stored(engine, Job), key=lambda one: one.id)
        assert (old.finished_at, old.result) == (before.finished_at, 7)
        assert (copy.id, copy.status, copy.result) == (copy_id, JobStatus.SUCCEEDED, 7)
        assert (copy.priority, copy.max_attempts, copy.tags) == (2, 3, ["a"])
        assert copy.meta == {"b": 1, "pgqueue.timeout": 3600.0, "pgqueue.copy_of": old.id}
        assert ran == [(7, {"b": 1})] * 2
        assert violations(engine) == []

    def test_a_copy_belongs_to_no_batch(self, queue: PgQueue, engine: Engine) -> None:
        task = queue.task(name="t")(lambda: None)
        with queue.session() as session, session.begin(), queue.batch(session) as batch:
            job = task.enqueue(session)
            job_id = job.id
        run(queue)

        copy_id = run_again(queue, job_id)

        with queue.session() as session:
            assert session.get_one(Job, copy_id).meta == {"pgqueue.copy_of": job_id}
            assert queue.get_batch(session, batch.id).total == 1

    def test_a_copy_waits_for_the_limits_of_its_job(self, queue: PgQueue, engine: Engine) -> None:
        task = queue.task(name="t", limit=Limit(1))(lambda: None)
        job = task.delay()
        run(queue)

        copy_id = run_again(queue, job.id)

        assert [one.target_id for one in stored(engine, WaitingMessage)] == [copy_id]
        run(queue)
        assert status_of(queue, copy_id) is JobStatus.SUCCEEDED

    def test_a_job_that_has_not_ended_is_not_copied(self, queue: PgQueue, engine: Engine) -> None:
        job = queue.task(name="t")(lambda: None).delay()

        with pytest.raises(OptionError, match=f"job {job.id} has not ended"):
            run_again(queue, job.id)
        with pytest.raises(JobNotFound):
            run_again(queue, 4711)
        assert len(stored(engine, Job)) == 1

    def test_a_taken_key_refuses_the_copy(self, queue: PgQueue) -> None:
        task = queue.task(name="t", unique=Unique())(lambda: None)
        job = task.delay()
        run(queue)
        holder = task.options(delay=HOUR).delay()

        with pytest.raises(DuplicateJob, match=f"job {holder.id} of its queue holds"):
            run_again(queue, job.id)
        result = queue.operate("ada").run_again(Selection([job.id])).last
        assert (
            str(result) == f"{job.id}: key taken, because job {holder.id} of its queue has its "
            "unique key"
        )

    def test_many_run_again_over_a_time(self, queue: PgQueue, engine: Engine) -> None:
        task = queue.task(name="t")(lambda n: None)
        ids = [task.delay(n).id for n in range(3)]
        run(queue)

        outcome = queue.operate("ada").run_again(
            Selection(task="t", status="succeeded"), spread=HOUR
        )

        assert outcome.counts == {"copied": 3}
        copies = [job for job in stored(engine, Job) if job.id not in ids]
        assert [copy.args for copy in sorted(copies, key=lambda one: one.run_at)] == [
            {"n": n} for n in range(3)
        ]
        assert max(copy.run_at for copy in copies) > min(copy.run_at for copy in copies)
        assert outcome.last is not None
        assert outcome.last.copy_id == max(copy.id for copy in copies)
        [action] = stored(engine, OperatorAction)
        assert (action.action, action.jobs) == ("run_again", 3)


class TestDelete:
    @pytest.mark.parametrize("state", ["waits", "waits for a limit", "ended", "failed"])
    def test_a_job_is_deleted_with_its_records(
        self, queue: PgQueue, engine: Engine, state: str
    ) -> None:
        def handle() -> None:
            if state == "failed":
                raise ValueError

        limit = Limit(1) if state == "waits for a limit" else ()
        job = queue.task(name="t", limit=limit, max_attempts=1)(handle).delay()
        if state in ("ended", "failed"):
            run(queue)

        delete(queue, job.id)

        for table in (Job, MessageQueue, WaitingMessage, JobAttempt):
            assert stored(engine, table) == []
        assert violations(engine) == []

    @pytest.mark.parametrize("by", ["call", "session"])
    def test_a_job_that_runs_is_refused(
        self, queue: PgQueue, engine: Engine, worker: LogicalWorker, by: str
    ) -> None:
        claimed = worker.claim_new(engine)
        delete_it = delete if by == "call" else delete_object

        with pytest.raises(OptionError, match=r"it runs, or a worker is about to .* cancel it"):
            delete_it(queue, claimed.job_id)

        assert status_of(queue, claimed.job_id) is JobStatus.RUNNING
        assert violations(engine) == []

    def test_a_job_whose_claim_is_not_committed_is_refused(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        job_id = enqueue(engine)
        with Session(engine) as claiming:
            claiming.execute(text("DELETE FROM pgqueue.message_queue"))

            with pytest.raises(OptionError, match="a worker is about to start it"):
                delete(queue, job_id)

        assert status_of(queue, job_id) is JobStatus.PENDING
        assert violations(engine) == []

    def test_a_job_for_which_others_wait_is_refused(self, queue: PgQueue, engine: Engine) -> None:
        task = queue.task(name="t")(lambda: None)
        with queue.session() as session, session.begin(), queue.batch(session):
            job_id = task.enqueue(session).id

        with pytest.raises(OptionError, match=r"a batch, a workflow or another job waits"):
            delete(queue, job_id)

        run(queue)
        delete(queue, job_id)
        assert stored(engine, Job) == []

    def test_a_job_that_waits_for_others_is_deleted(self, queue: PgQueue, engine: Engine) -> None:
        task = queue.task(name="t")(lambda: None)
        with queue.session() as session, session.begin(), queue.workflow(session) as flow:
            first = flow.add(task.job())
            last_id = flow.add(task.job(), after=[first]).id
        with queue.session() as session, session.begin():
            session.delete(session.get_one(Job, last_id))

        assert last_id not in [one.node_id for one in stored(engine, Blocked)]
        assert last_id not in [one.id for one in stored(engine, Job)]

    @pytest.mark.parametrize("more", ["", "DEFERRABLE INITIALLY DEFERRED"])
    def test_a_job_to_which_a_row_refers_is_refused(
        self, queue: PgQueue, engine: Engine, more: str
    ) -> None:
        job = queue.task(name="t")(lambda: None).delay()
        with engine.begin() as connection:
            connection.execute(
                text(f"CREATE TABLE orders (job_id bigint REFERENCES pgqueue.jobs {more})")
            )
            connection.execute(text(f"INSERT INTO orders VALUES ({job.id})"))

        outcome = queue.operate("ada").delete(Selection([job.id]))

        assert outcome.counts == {"refused": 1}
        assert "a row of the application refers to it" in str(outcome.last)
        assert status_of(queue, job.id) is JobStatus.PENDING
        assert violations(engine) == []

    def test_many_are_deleted_and_the_log_says_so(self, queue: PgQueue, engine: Engine) -> None:
        task = queue.task(name="t")(lambda n: None)
        for n in range(3):
            task.delay(n)
        run(queue)

        outcome = queue.operate("ada").delete(Selection(task="t", status="succeeded"))

        assert (outcome.counts, stored(engine, Job)) == ({"deleted": 3}, [])
        [action] = stored(engine, OperatorAction)
        assert (action.action, action.jobs) == ("delete", 3)

    def test_an_unknown_job_is_not_found(self, queue: PgQueue, engine: Engine) -> None:
        with pytest.raises(JobNotFound):
            delete(queue, 4711)
