"""A worker on a node of Citus is woken through the coordinator; `make citus` has the whole way."""

from collections.abc import Iterator
from queue import Queue

import pytest
from sqlalchemy import Engine, text

from chaos.workers import PATIENCE
from pgqueue import PgQueue
from pgqueue.database import notifications
from pgqueue.worker.duties.coordinator import CoordinatorListener

LOSE = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND application_name LIKE '%coordinator%'"
)


@pytest.fixture
def wakes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator["Queue[None]"]:
    monkeypatch.setattr(notifications, "LATER", 0.0)
    wakes: Queue[None] = Queue()
    listener = CoordinatorListener(engine, lambda: wakes.put(None))
    listener.start()
    yield wakes
    listener.stop(seconds=PATIENCE)
    assert not listener.is_alive()
    assert listener.failure is None


def test_an_enqueue_on_the_coordinator_wakes_also_after_its_connection_was_lost(
    engine: Engine, wakes: "Queue[None]"
) -> None:
    task = PgQueue(engine).task(name="t")(lambda: None)
    wakes.get(timeout=PATIENCE)  # it listens from now on

    for _ in range(2):
        task.delay()
        wakes.get(timeout=PATIENCE)
        wakes.get(timeout=PATIENCE)  # for those that were enqueued in the pause
        with engine.begin() as connection:
            assert connection.scalars(LOSE).all() == [True]
        wakes.get(timeout=PATIENCE)
