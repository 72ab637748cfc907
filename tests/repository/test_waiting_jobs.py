"""Jobs that wait for others, beside the ends of these, in the orders in which looks could miss."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import violations
from pgqueue import Job, JobStatus, PgQueue
from pgqueue.worker.looks import Looker

queue = PgQueue()
CLIENTS = 4
FAN_INS = 120


@queue.task(name="tests.piece", max_attempts=1)
def piece() -> None: ...


@pytest.fixture
def bound(engine: Engine) -> Engine:
    queue.bind(engine)
    return engine


@pytest.fixture
def looking(bound: Engine) -> Iterator[Connection]:
    with bound.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        yield connection


def fan_in(engine: Engine, predecessors: int) -> tuple[list[int], int]:
    """The ids of some jobs, and of one that starts when these have ended."""
    with Session(engine) as session, session.begin(), queue.workflow(session) as flow:
        before = piece.enqueue_many(session, [()] * predecessors)
        return before, flow.add(piece.job(), after=before, when="ended").id


def end(engine: Engine, *job_ids: int) -> None:
    with Session(engine) as session, session.begin():
        for job_id in job_ids:
            queue.cancel(session, job_id)


def look(connection: Connection, *job_ids: int) -> int:
    return Looker(notify=False).look(connection, job_ids)


def status(engine: Engine, job_id: int) -> JobStatus:
    with Session(engine) as session:
        return session.get_one(Job, job_id).status


def outcome(engine: Engine, batch_id: int) -> str | None:
    with Session(engine) as session:
        return queue.get_batch(session, batch_id).outcome


def test_ends_that_race_leave_nothing_to_the_sweep(bound: Engine) -> None:
    dice = Random(7)
    ends: list[int] = []
    nodes = []
    for _ in range(FAN_INS):
        before, node = fan_in(bound, dice.randint(2, 6))
        ends += before
        nodes.append(node)
    dice.shuffle(ends)

    def settle(part: int) -> int:
        engine = bound.execution_options(isolation_level="READ COMMITTED")
        released = 0
        with engine.connect() as connection:
            for job_id in ends[part::CLIENTS]:
                end(bound, job_id)
                released += look(connection, job_id)
        return released

    with ThreadPoolExecutor(CLIENTS) as clients:
        assert sum(clients.map(settle, range(CLIENTS))) == FAN_INS

    assert {status(bound, node) for node in nodes} == {"pending"}
    with bound.begin() as connection:
        messages = connection.scalar(text("SELECT count(*) FROM pgqueue.message_queue"))
    assert messages == FAN_INS


def test_an_end_between_a_look_and_its_commit_is_seen_by_the_second_look(
    bound: Engine, looking: Connection
) -> None:
    (first, last), node = fan_in(bound, 2)
    end(bound, last)
    steps: list[Callable[[], None]] = [lambda: end(bound, first)]

    @contextmanager
    def begin() -> Iterator[None]:
        with looking.begin():
            yield
            if steps:
                steps.pop(0)()

    assert Looker(notify=False).look(looking, [last], begin=begin) == 1

    assert status(bound, node) == "pending"


def test_a_look_leaves_out_what_another_transaction_lets_wait_for_more(
    bound: Engine, looking: Connection
) -> None:
    [before], node = fan_in(bound, 1)
    with Session(bound) as session:
        with queue.extend_workflow(session, 1, before_successors_of=before):
            added = piece.enqueue(session).id
        end(bound, before)
        assert look(looking, before) == 0
        session.commit()

    assert look(looking, before) == 0
    assert status(bound, node) == "blocked"
    end(bound, added)
    assert look(looking, added) == 1


def test_a_cancel_beside_a_release_starts_nothing(bound: Engine, looking: Connection) -> None:
    [before], node = fan_in(bound, 1)
    end(bound, before)
    with Session(bound) as session:
        queue.cancel(session, node)
        assert look(looking, before) == 0
        session.commit()

    Looker(notify=False).sweep(looking)

    assert status(bound, node) == "cancelled"
    with looking.begin():
        assert looking.scalar(text("SELECT count(*) FROM pgqueue.blocked")) == 0
        assert looking.scalar(text("SELECT count(*) FROM pgqueue.message_queue")) == 0
    assert violations(bound) == []


def test_two_failures_before_one_job_are_requeued_at_once(
    bound: Engine, looking: Connection
) -> None:
    with Session(bound) as session, session.begin(), queue.workflow(session) as flow:
        both = piece.enqueue_many(session, [(), ()])
        node = flow.add(piece.job(), after=both).id
    end(bound, *both)
    look(looking, *both)
    assert status(bound, node) == "cancelled"

    def requeue(job_id: int) -> None:
        with Session(bound) as session, session.begin():
            queue.requeue(session, job_id)

    with ThreadPoolExecutor(2) as clients:
        list(clients.map(requeue, both))

    assert [status(bound, each) for each in (*both, node)] == ["pending", "pending", "blocked"]
    assert violations(bound) == []


def test_a_job_that_cannot_be_released_stops_no_other(bound: Engine, looking: Connection) -> None:
    with Session(bound) as session, session.begin(), queue.workflow(session) as flow:
        root = flow.add(piece.job()).id
        refused, other = (flow.add(piece.job(), after=root, when="ended").id for _ in range(2))
    with looking.begin():
        looking.exec_driver_sql(
            f"""
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'not today'; END $$;
            CREATE TRIGGER refuse BEFORE UPDATE ON pgqueue.jobs
            FOR EACH ROW WHEN (OLD.id = {refused}) EXECUTE FUNCTION refuse();
            """
        )
    end(bound, root)

    assert look(looking, root) == 1

    assert (status(bound, refused), status(bound, other)) == ("blocked", "pending")


def test_a_long_chain_of_skips_is_one_look(bound: Engine, looking: Connection) -> None:
    with Session(bound) as session, session.begin(), queue.workflow(session) as flow:
        first = last = flow.add(piece.job()).id
        for _ in range(20):
            last = flow.add(piece.job(), after=last).id
    end(bound, first)

    look(looking, first)

    assert status(bound, last) == "cancelled"
    assert outcome(bound, flow.id) == "cancelled"


def test_a_requeue_beside_a_look_loses_nothing(bound: Engine, looking: Connection) -> None:
    with Session(bound) as session, session.begin(), queue.workflow(session) as flow:
        failed, other = piece.enqueue_many(session, [(), ()])
        node = flow.add(piece.job(), after=[failed, other]).id
        last = flow.add(piece.job(), after=node).id
    end(bound, failed)
    with Session(bound) as session:
        queue.requeue(session, failed)
        end(bound, other)
        look(looking, other, -flow.id)  # sees that the first was cancelled
        session.commit()
    Looker(notify=False).sweep(looking)

    found = [status(bound, each) for each in (failed, other, node, last)]
    assert found == ["pending", "cancelled", "blocked", "blocked"]
    end(bound, failed)
    look(looking, failed, -flow.id)
    assert outcome(bound, flow.id) == "cancelled"
    assert violations(bound) == []


def test_a_job_whose_cancel_waits_for_a_worker_does_not_come_back(
    bound: Engine, looking: Connection
) -> None:
    [before], node = fan_in(bound, 1)
    end(bound, before)
    look(looking, before)  # it is pending now
    with bound.connect() as claiming:
        claiming.execute(text("SELECT FROM pgqueue.message_queue FOR UPDATE"))
        end(bound, node)
    with Session(bound) as session, session.begin():
        queue.requeue(session, before)

    # A message is left, which the worker that has claimed it deletes.
    assert [status(bound, each) for each in (before, node)] == ["pending", "cancelled"]
