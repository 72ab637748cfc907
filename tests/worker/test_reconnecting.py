"""A line to the database: what becomes of its connection when the server refuses a statement."""

from collections.abc import Iterator
from threading import Event

import pytest
from sqlalchemy import Connection, Engine, text

from pgqueue.database.opening import backend_pid
from pgqueue.worker.outage import Outage
from pgqueue.worker.reconnecting import ReconnectingConnection


@pytest.fixture(params=[False, True], ids=["any", "kept"])
def line(engine: Engine, request: pytest.FixtureRequest) -> Iterator[ReconnectingConnection]:
    made = ReconnectingConnection(
        engine, {}, Outage(), name="line", stopping=Event(), is_kept=request.param
    )
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE cups AS SELECT 1 AS handle"))
    yield made
    made.close()


def cups(connection: Connection) -> int:
    return len(connection.execute(text("SELECT * FROM cups")).all())


def test_a_plan_that_the_server_refuses_is_not_refused_for_ever(
    engine: Engine, line: ReconnectingConnection
) -> None:
    before = [line.run(cups) for _ in range(12)]  # prepared by the driver meanwhile
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE cups ADD COLUMN saucer int"))

    after = [line.run(cups) for _ in range(12)]

    assert before == [1] * 12
    assert after[1:] == [1] * 11


def test_only_a_kept_line_goes_on_with_its_connection(line: ReconnectingConnection) -> None:
    before = line.run(backend_pid)

    assert line.run(lambda connection: connection.execute(text("SELECT 1 / 0"))) is None

    after = line.run(backend_pid)
    assert (before == after) == line._is_kept
    assert line.run(cups) == 1


def test_a_refused_role_is_told_the_remedy(
    engine: Engine, line: ReconnectingConnection, caplog: pytest.LogCaptureFixture
) -> None:
    def read_as_a_role_without_rights(connection: Connection) -> None:
        connection.execute(text("SET ROLE pg_monitor"))
        connection.execute(text("SELECT FROM pgqueue.batches"))

    assert line.run(read_as_a_role_without_rights) is None

    [refused] = [record.getMessage() for record in caplog.records]
    assert "the database refuses: permission denied for schema pgqueue" in refused
    assert refused.endswith("run `pgqueue grant --worker ROLE`, as after each upgrade")
