"""What a requeue leaves alone: a job that a worker may still have gets no second message."""

import pytest
from sqlalchemy import Connection, Engine, text

from chaos.interleavings.logical_workers import committed, enqueue, execute, stored
from pgqueue import Change, Job, MessageQueue, PgQueue
from pgqueue.repository.jobs import Jobs, requeue_jobs
from pgqueue.repository.many import ManyJobs

MESSAGE = """
    INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task)
    SELECT queue, priority, run_at, id, task FROM pgqueue.jobs
"""
LEASE = """
    INSERT INTO pgqueue.leases (target_id, message_id, attempt, worker_id)
    SELECT id, 1, 1, '00000000-0000-0000-0000-000000000000' FROM pgqueue.jobs
"""


@pytest.fixture
def dead(engine: Engine) -> int:
    """A job that was cancelled."""
    job_id = enqueue(engine)
    committed(engine, PgQueue().cancel, job_id)
    return job_id


@pytest.fixture(params=[MESSAGE, LEASE], ids=["a message", "a lease"])
def left(request: pytest.FixtureRequest, engine: Engine, dead: int) -> int:
    """The same, with what a claim or a late settle has left."""
    execute(engine, request.param)
    return dead


def test_nothing_is_changed_while_a_claim_holds_the_message(engine: Engine, dead: int) -> None:
    """If the claim is rolled back, the message stays: the job would have two."""
    execute(engine, MESSAGE)
    with engine.begin() as claim:
        claim.execute(text("SELECT FROM pgqueue.message_queue FOR UPDATE"))

        def requeue(connection: Connection) -> Change:
            edit = lambda _: {"priority": 0}  # noqa: E731
            return Jobs(connection).requeue(dead, notify=False, edit=edit)

        assert committed(engine, requeue) is Change.UNCHANGED

    [job] = stored(engine, Job)
    assert (job.outcome, job.priority) == ("cancelled", 5)
    assert len(stored(engine, MessageQueue)) == 1


def test_one_that_has_a_message_or_a_lease_needs_a_requeue_of_its_own(
    engine: Engine, left: int
) -> None:
    """It is not among those that one statement puts back, and is put back all the same."""

    def requeue_many(connection: Connection) -> dict[int, Change]:
        return ManyJobs(connection).requeue({left: None}, notify=False)

    assert committed(engine, requeue_many) == {}
    assert committed(engine, PgQueue().requeue, left) is Change.REQUEUED
    assert len(stored(engine, MessageQueue)) == 1


def test_the_statement_passes_by_one_that_was_claimed_since_its_row_was_locked(
    engine: Engine, left: int
) -> None:
    before = len(stored(engine, MessageQueue))

    def put_back(connection: Connection) -> int:
        given = {"wanted": f'[{{"id": {left}, "run_at": null}}]'}
        return len(connection.execute(requeue_jobs(notify=False), given).all())

    assert committed(engine, put_back) == 0
    assert len(stored(engine, MessageQueue)) == before
