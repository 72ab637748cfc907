"""Ending batches, and past those that cannot be ended."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine, text, update

from pgqueue import PgQueue
from pgqueue.repository.batches import Batches
from pgqueue.tables import Batch
from pgqueue.worker.duties.batches import BatchEnds

REFUSING = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'not today'; END $$;
    CREATE TRIGGER refuse BEFORE UPDATE ON pgqueue.batches
    FOR EACH ROW WHEN (OLD.id = 1) EXECUTE FUNCTION refuse();
"""


@pytest.fixture
def ending(engine: Engine) -> Iterator[Connection]:
    """The connection on which a worker ends batches; two batches have only jobs that have ended."""
    queue = PgQueue(engine)
    piece = queue.task(name="tests.piece")(lambda: None)
    told = queue.task(name="tests.told")(lambda batch_id: None)
    with queue.session() as session, session.begin():
        for _ in range(2):
            with queue.batch(session, on_cancelled=told):
                queue.cancel(session, piece.enqueue(session).id)
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        yield connection


def ended(connection: Connection) -> list[int]:
    with connection.begin():
        statement = text("SELECT id FROM pgqueue.batches WHERE ended_at IS NOT NULL ORDER BY id")
        return list(connection.scalars(statement))


def change_first(connection: Connection, on_cancelled: str) -> None:
    with connection.begin():
        connection.execute(
            text(f"UPDATE pgqueue.batches SET on_cancelled = {on_cancelled} WHERE id = 1")
        )


UNREADABLE = [
    """on_cancelled || '{"colour": "red"}'""",
    "on_cancelled - 'priority'",
    """on_cancelled || '{"priority": "high"}'""",
    "'[]'",
]


@pytest.mark.parametrize("on_cancelled", UNREADABLE)
def test_an_unreadable_callback_waits_for_code_that_reads_it_and_stops_no_other(
    ending: Connection, on_cancelled: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = ending.scalar(text("SELECT on_cancelled FROM pgqueue.batches WHERE id = 1"))
    ending.rollback()
    change_first(ending, on_cancelled)
    ends = BatchEnds(notify=False)

    assert [ends.end(ending) for _ in range(3)] == [1, 0, 0]

    assert ended(ending) == [2]
    [told] = [one.message for one in caplog.records if one.levelname == "ERROR"]
    assert told.startswith("batch 1 cannot be ended, and stays open: UnreadableCallback: its ")
    with ending.begin():
        [candidate] = Batches(ending).overdue()
        assert candidate.unreadable
        assert candidate.unreadable in told
        ending.execute(update(Batch).values(on_cancelled=before).where(Batch.id == 1))
    assert BatchEnds(notify=False).end(ending) == 1
    assert ended(ending) == [1, 2]


@pytest.mark.parametrize("refusal", ["""on_cancelled || '{"priority": 99}'""", "on_cancelled"])
def test_a_batch_whose_end_the_database_refuses_stops_no_other(
    ending: Connection, refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    change_first(ending, refusal)
    if refusal == "on_cancelled":
        with ending.begin():
            ending.exec_driver_sql(REFUSING)
    ends = BatchEnds(notify=False)

    assert [ends.end(ending) for _ in range(2)] == [1, 0]

    assert ended(ending) == [2]
    assert caplog.text.count("batch 1 cannot be ended, and stays open") == 1
    with ending.begin():
        assert ending.scalar(text("SELECT count(*) FROM pgqueue.jobs WHERE task LIKE '%told'")) == 1


def test_more_batches_than_one_read_finds_end_in_one_go(
    ending: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.worker.duties.batches.CANDIDATES", 1)

    assert BatchEnds(notify=False).end(ending) == 2
