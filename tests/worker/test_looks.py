"""Looking at batches, and past those that cannot be ended."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine, text

from pgqueue import PgQueue
from pgqueue.repository import blocked
from pgqueue.worker.looks import Looker

REFUSING = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'not today'; END $$;
    CREATE TRIGGER refuse BEFORE UPDATE ON pgqueue.batches
    FOR EACH ROW WHEN (OLD.id = 1) EXECUTE FUNCTION refuse();
"""


@pytest.fixture
def looking(engine: Engine) -> Iterator[Connection]:
    """The connection on which a worker looks; two batches have only jobs that have ended."""
    queue = PgQueue(engine)
    piece = queue.task(name="tests.piece")(lambda: None)
    told = queue.task(name="tests.told")(lambda batch_id: None)
    with queue.session() as session, session.begin():
        for _ in range(2):
            with queue.batch(session, on_cancelled=told):
                queue.cancel(session, piece.enqueue(session).id)
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        yield connection


def test_a_batch_whose_end_the_database_refuses_stops_no_other(
    looking: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with looking.begin():
        looking.exec_driver_sql(REFUSING)
    looker = Looker(notify=False)

    assert [looker.sweep(looking) for _ in range(2)] == [1, 0]

    assert caplog.text.count("batch 1 cannot be ended, and stays open") == 1
    with looking.begin():
        ended = looking.scalars(text("SELECT id FROM pgqueue.batches WHERE ended_at IS NOT NULL"))
        assert list(ended) == [2]
        blocked = looking.scalars(text("SELECT node_id FROM pgqueue.blocked WHERE node_id < 0"))
        assert list(blocked) == [-1]


def test_a_sweep_reads_all_in_windows(looking: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "WINDOW", 1)
    blocked.swept.cache_clear()
    try:
        assert Looker(notify=False).sweep(looking) == 2
    finally:
        monkeypatch.undo()
        blocked.swept.cache_clear()
