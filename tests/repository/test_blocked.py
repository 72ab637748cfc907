"""Looks beside ends, cancels and requeues, in the orders in which they could miss each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection, Engine, select, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import execute, violations
from pgqueue import Job, JobStatus, PgQueue
from pgqueue.repository.blocked import NOTHING, WINDOW, BlockedNodes
from pgqueue.worker.looks import Looker

queue = PgQueue()
SEVERAL = 20


@queue.task(name="tests.piece", max_attempts=1)
def piece() -> None: ...


@queue.task(name="tests.told")
def told(batch_id: int) -> None: ...


@pytest.fixture
def members(engine: Engine) -> list[int]:
    """The jobs of a batch that has a callback for each outcome."""
    queue.bind(engine)
    with (
        Session(engine) as session,
        session.begin(),
        queue.batch(session, on_success=told, on_failure=told),
    ):
        return piece.enqueue_many(session, [()] * SEVERAL)


@pytest.fixture
def looking(engine: Engine) -> Iterator[Connection]:
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        yield connection


def end(engine: Engine, *job_ids: int) -> None:
    with Session(engine) as session, session.begin():
        for job_id in job_ids:
            queue.cancel(session, job_id)


def look(connection: Connection, *job_ids: int) -> int:
    return Looker(notify=False).look(connection, job_ids)


def watched(engine: Engine) -> int:
    with engine.connect() as connection:
        statement = text("SELECT waits_for FROM pgqueue.blocked WHERE node_id < 0")
        return int(connection.execute(statement).scalar_one())


def callbacks(engine: Engine) -> list[JobStatus]:
    with Session(engine) as session:
        jobs = session.scalars(select(Job).where(Job.task == "tests.told"))
        return [job.status for job in jobs]


def test_jobs_that_end_in_order_move_the_watch_at_most_once(
    engine: Engine, members: list[int], looking: Connection
) -> None:
    for job_id in members[:-1]:
        end(engine, job_id)
        assert look(looking, job_id) == 0
        assert watched(engine) == members[-1]

    end(engine, members[-1])
    assert look(looking, members[-1]) == 1
    assert callbacks(engine) == ["pending"]


def test_an_end_between_a_look_and_its_commit_is_seen_by_the_second_look(
    engine: Engine, members: list[int], looking: Connection
) -> None:
    first, *others, last = members
    end(engine, *others, last)

    def end_the_first() -> None:
        end(engine, first)
        with engine.connect() as other:
            assert look(other, first, -1) == 0  # the watch is not committed yet

    steps: list[Callable[[], None]] = [lambda: None, end_the_first]

    @contextmanager
    def begin() -> Iterator[None]:
        with looking.begin():
            yield
            if steps:
                steps.pop(0)()

    assert Looker(notify=False).look(looking, [last], begin=begin) == 1
    assert callbacks(engine) == ["pending"]


def test_a_look_before_the_commit_of_an_end_sees_nothing_and_one_after_it_does(
    engine: Engine, members: list[int], looking: Connection
) -> None:
    *others, last = members
    end(engine, *others)
    with Session(engine) as session:
        queue.cancel(session, last)
        assert look(looking, last) == 0
        session.commit()

    assert look(looking, last) == 1


def test_an_end_makes_up_for_a_look_that_has_met_an_addition(
    engine: Engine, members: list[int], looking: Connection
) -> None:
    end(engine, *members)
    with Session(engine) as session:
        with queue.extend_batch(session, 1):
            added = piece.enqueue(session).id
        assert look(looking, members[-1]) == 0
        session.commit()
    end(engine, added)

    assert look(looking, added) == 0  # nothing watches it
    assert look(looking, added, -1) == 1


@pytest.mark.parametrize("place", [0, -1], ids=["before the watch", "behind the watch"])
def test_a_job_that_is_requeued_after_the_watch_has_passed_it_counts(
    engine: Engine, members: list[int], looking: Connection, place: int
) -> None:
    middle, again = members[SEVERAL // 2], members[place]
    end(engine, *(job_id for job_id in members if job_id != middle))
    look(looking, members[-1])
    assert watched(engine) == middle

    with Session(engine) as session, session.begin():
        queue.requeue(session, again)
    end(engine, middle)

    assert look(looking, middle) == 0
    assert watched(engine) == again


def test_a_callback_that_is_being_cancelled_is_not_released(
    engine: Engine, members: list[int], looking: Connection
) -> None:
    with Session(engine) as session:
        callback = session.scalars(
            text("SELECT id FROM pgqueue.jobs WHERE meta->'pgqueue.when' ? 'cancelled'")
        ).one()
        queue.cancel(session, callback)
        end(engine, *members)
        assert look(looking, members[-1]) == 0
        session.commit()

    assert callbacks(engine) == ["cancelled"]
    assert violations(engine) == []


def test_a_row_that_a_cancel_could_not_delete_is_dropped_by_the_look(
    engine: Engine, members: list[int], looking: Connection
) -> None:
    with engine.connect() as other:
        rows = "SELECT node_id FROM pgqueue.blocked WHERE node_id > 0 FOR UPDATE"
        both = list(other.scalars(text(rows)))
        end(engine, *both)
    end(engine, *members)

    assert look(looking, members[-1]) == 0

    assert callbacks(engine) == ["cancelled"] * 2
    assert violations(engine) == []
    with looking.begin():
        assert looking.scalar(text("SELECT count(*) FROM pgqueue.blocked")) == 0
        assert looking.scalar(text("SELECT count(*) FROM pgqueue.message_queue")) == 0


def test_a_callback_that_another_transaction_has_locked_is_released_by_the_sweep(
    engine: Engine, members: list[int], looking: Connection
) -> None:
    end(engine, *members)
    with engine.begin() as other:
        other.execute(text("SELECT FROM pgqueue.jobs WHERE task = 'tests.told' FOR UPDATE"))
        assert look(looking, members[-1]) == 0
        assert callbacks(engine) == ["blocked"] * 2

    assert Looker(notify=False).sweep(looking) == 1

    assert callbacks(engine) == ["pending"]
    with Session(engine) as session:
        [state] = queue.batches(session)
        assert session.get_one(Job, state.callback_id).status == "pending"


@pytest.mark.parametrize("damage", ["jobs", "batches"])
def test_what_is_gone_counts_as_succeeded(
    engine: Engine, members: list[int], looking: Connection, damage: str
) -> None:
    ids = members if damage == "jobs" else [1]
    execute(engine, f"DELETE FROM pgqueue.{damage} WHERE id IN ({', '.join(map(str, ids))})")
    if damage == "batches":
        end(engine, *members)

    Looker(notify=False).sweep(looking)

    with Session(engine) as session:
        assert (
            session.scalars(select(Job).where(Job.task == "tests.told")).one().status == "pending"
        )


def test_a_sweep_reads_the_newest_rows_and_a_window_that_moves(
    engine: Engine, members: list[int], looking: Connection
) -> None:
    many = f"""
        INSERT INTO pgqueue.jobs (task) SELECT 'tests.other' FROM generate_series(1, {2 * WINDOW});
        INSERT INTO pgqueue.blocked SELECT -id, id FROM pgqueue.jobs WHERE task = 'tests.other';
        INSERT INTO pgqueue.blocked VALUES (-9999, {NOTHING})
    """
    execute(engine, many)
    end(engine, members[-1])

    with looking.begin():
        nodes, windows, swept_to = BlockedNodes(looking), [], None
        for _ in range(3):
            over, swept_to = nodes.swept(swept_to)
            windows.append(sorted(over))

    assert windows == [[NOTHING], [NOTHING], [members[-1], NOTHING]]
    assert swept_to is None
