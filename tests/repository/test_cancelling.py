"""Many jobs are cancelled at once: those that wait end, the others are asked."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import LogicalWorker, enqueue, waiting
from pgqueue import (
    ArgumentsError,
    Change,
    Job,
    JobStatus,
    Limit,
    OptionError,
    PgQueue,
    Unique,
    Worker,
)
from pgqueue.outcomes import Succeeded
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.listing import Listing
from pgqueue.repository.many import ManyJobs

queue = PgQueue()


@queue.task(queue="mail")
def send(n: int) -> None: ...


@queue.task(limit=Limit(1, by="customer"))
def sync(customer: int) -> None: ...


@pytest.fixture(autouse=True)
def bound(engine: Engine) -> None:
    queue.bind(engine)


def cancel(engine: Engine, **conditions: Any) -> dict[Change, int]:
    with Session(engine) as session, session.begin():
        return queue.cancel_where(session, **conditions)


def by_key(engine: Engine, *which: Any) -> dict[Change, int]:
    with Session(engine) as session, session.begin():
        return queue.cancel_by_key(session, *which)


def statuses(engine: Engine) -> dict[int, JobStatus]:
    with Session(engine) as session:
        assert queue.check(session) == []
        return {job.id: job.status for job in session.query(Job)}


def test_each_condition_selects_its_jobs(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        with queue.batch(session, "all") as batch:
            in_batch = send.enqueue(session, 1).id
        others = {
            "tag": send.options(tags=["vip"]).enqueue(session, 2).id,
            "unique_key": send.options(unique_key="seven").enqueue(session, 3).id,
            "limit_key": sync.enqueue(session, 7).id,
            "queue": send.options(queue="letters").enqueue(session, 4).id,
            "task": sync.enqueue(session, 8).id,
        }
        kept = send.options(delay=timedelta(days=1)).enqueue(session, 5).id
        limit_key = session.get_one(Job, others["limit_key"]).limit_keys
    values = {"tag": "vip", "unique_key": "seven", "limit_key": limit_key, "queue": "letters"}

    assert cancel(engine, batch=batch.id) == {Change.CANCELLED: 1}
    assert statuses(engine)[in_batch] == JobStatus.CANCELLED
    for name, job_id in others.items():
        assert cancel(engine, **{name: values.get(name, sync.name)}) == {Change.CANCELLED: 1}, name
        assert statuses(engine)[job_id] == JobStatus.CANCELLED, name
    assert statuses(engine)[kept] == JobStatus.PENDING


def test_a_claimed_job_is_asked_to_stop(engine: Engine, worker: LogicalWorker) -> None:
    first = enqueue(engine)
    worker.claim()
    second = enqueue(engine)

    assert cancel(engine, queue="default") == {Change.CANCELLED: 1, Change.CANCEL_REQUESTED: 1}
    assert statuses(engine) == {first: JobStatus.RUNNING, second: JobStatus.CANCELLED}


def test_a_job_that_is_locked_is_left_by_the_statement(engine: Engine) -> None:
    """So that it never waits while it holds the rows of many others."""
    ids = [send.delay(n).id for n in range(3)]
    which = JobFilter(frozenset({JobStatus.PENDING}), queue="mail")
    with engine.connect() as changing, engine.begin() as connection:
        changing.execute(
            text("SELECT 1 FROM pgqueue.jobs WHERE id = :id FOR UPDATE"), {"id": ids[1]}
        )
        found = Listing(connection).found(which, limit=9)

        assert [one.id for one in found] == ids
        assert [*ManyJobs(connection).cancel(found)] == [ids[0], ids[2]]
    assert statuses(engine)[ids[1]] == JobStatus.PENDING


def test_a_running_job_that_is_deleted_meanwhile_is_no_error(
    engine: Engine, worker: LogicalWorker
) -> None:
    """As one that succeeds with keep=timedelta(0)."""
    first, second = enqueue(engine), enqueue(engine)
    worker.claim(2)
    with engine.connect() as deleting, engine.connect() as cancelling:
        for table, column in (("jobs", "id"), ("leases", "target_id")):
            gone = f"DELETE FROM pgqueue.{table} WHERE {column} = {first}"
            deleting.execute(text(gone))

        def cancel_both() -> dict[Change, int]:
            return queue.cancel_where(cancelling, queue="default")

        with waiting(engine, cancelling, cancel_both) as counts:
            deleting.commit()
        cancelling.commit()

    assert counts == [{Change.UNCHANGED: 1, Change.CANCEL_REQUESTED: 1}]
    assert statuses(engine) == {second: JobStatus.RUNNING}


def test_jobs_that_have_ended_and_all_jobs_are_refused(engine: Engine) -> None:
    with pytest.raises(OptionError, match="'failed' is none of pending, blocked, running"):
        cancel(engine, status="failed", queue="mail")
    with pytest.raises(OptionError, match="which jobs"):
        cancel(engine)
    with pytest.raises(OptionError, match="tag is 7; give a text"):
        cancel(engine, tag=7)
    with pytest.raises(ArgumentsError, match="a batch's id is needed here, not str"):
        cancel(engine, batch="7")


class TestByKey:
    def test_a_cancel_by_key_ends_the_waiting_job(self, engine: Engine) -> None:
        other = send.options(unique_key="eight").delay(1)
        job = send.options(unique_key="seven").delay(2)

        assert by_key(engine, "seven") == {Change.CANCELLED: 1}
        assert by_key(engine, "seven") == {}
        assert statuses(engine) == {other.id: JobStatus.PENDING, job.id: JobStatus.CANCELLED}

    def test_a_cancel_by_key_is_of_one_queue_or_of_all(self, engine: Engine) -> None:
        for name in ("mail", "letters", "parcels"):
            send.options(unique_key="seven", queue=name).delay(1)

        assert by_key(engine, "seven", "mail") == {Change.CANCELLED: 1}
        assert by_key(engine, "seven") == {Change.CANCELLED: 2}

    def test_a_cancel_by_key_asks_a_running_job_to_stop(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        job = enqueue(engine, key="seven")
        worker.claim()

        assert by_key(engine, "seven") == {Change.CANCEL_REQUESTED: 1}
        assert by_key(engine, "seven") == {}, "it has given up its key"
        assert statuses(engine) == {job: JobStatus.RUNNING}

    def test_a_long_key_is_given_as_to_the_enqueue(self, engine: Engine) -> None:
        send.options(unique_key="é" * 600).delay(1)

        assert by_key(engine, "é" * 600) == {Change.CANCELLED: 1}

    def test_the_key_of_a_period_is_given_as_the_job_has_it(self, engine: Engine) -> None:
        once = send.options(unique=Unique(key="seven", period=timedelta(days=1)))
        job = once.delay(1)

        assert by_key(engine, str(job.unique_key)) == {Change.CANCELLED: 1}

        ended = once.delay(1)
        Worker(queue).run_until_empty(timeout=60)
        assert by_key(engine, str(ended.unique_key)) == {}, "it still has its key"
        assert statuses(engine)[ended.id] == JobStatus.SUCCEEDED

    @pytest.mark.parametrize("option", [{"period": timedelta(days=1)}, {"across": "queues"}])
    def test_a_cancelled_key_with_a_prefix_may_be_long(self, engine: Engine, option: Any) -> None:
        job = send.options(unique=Unique(key="7" * 512, **option)).delay(1)

        assert by_key(engine, str(job.unique_key)) == {Change.CANCELLED: 1}

    def test_a_cancel_and_a_filter_find_a_key_across_queues_as_it_was_given(
        self, engine: Engine
    ) -> None:
        across = send.options(unique=Unique(key="seven", across="queues"))
        across.delay(1)
        assert cancel(engine, unique_key="seven") == {Change.CANCELLED: 1}

        across.delay(1)
        assert by_key(engine, "seven") == {Change.CANCELLED: 1}

    @pytest.mark.parametrize("key", [7, None, "a\0", "\ud800"])
    def test_a_key_to_cancel_that_is_no_text_is_refused(self, engine: Engine, key: Any) -> None:
        with pytest.raises(OptionError, match=r"cancel_by_key: key is .*; give a text"):
            by_key(engine, key)


def test_the_key_of_a_job_that_is_being_cancelled_is_free(
    engine: Engine, worker: LogicalWorker
) -> None:
    """The next enqueue makes a new job, and not one that can only end cancelled."""
    first = enqueue(engine, key="seven")
    [claimed] = worker.claim()

    assert cancel(engine, unique_key="seven") == {Change.CANCEL_REQUESTED: 1}
    second = enqueue(engine, key="seven")

    assert second != first
    assert worker.settle(claimed, Succeeded())
    assert statuses(engine) == {first: JobStatus.CANCELLED, second: JobStatus.PENDING}
