"""The threads of a worker."""

import pytest
from sqlalchemy import Connection, Engine
from worker_rig import wait_until

from pgqueue.worker import threads
from pgqueue.worker.loop import Loop
from pgqueue.worker.outage import Outage
from pgqueue.worker.threads import WorkerThread


class WithoutMemory(WorkerThread):
    """Comes to its end before its first step, as a thread does that finds no memory."""

    def run(self) -> None: ...

    def work(self) -> None: ...


def test_a_thread_that_does_not_begin_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "BEGINS_WITHIN", 0.2)

    with pytest.raises(RuntimeError, match="pgqueue-slot has not begun"):
        WithoutMemory(name="slot").start()


class Unsteady(Loop):
    """Its first steps raise what no database raises."""

    steps = 0

    def step(self, connection: Connection) -> float:
        self.steps += 1
        raise SystemExit("from code of the application") if self.steps == 1 else KeyError("a row")


@pytest.mark.parametrize("is_vital", [False, True])
def test_only_a_vital_loop_ends_by_an_error_of_python(
    engine: Engine, caplog: pytest.LogCaptureFixture, is_vital: bool
) -> None:
    loop = Unsteady(engine, {}, Outage(), name="unsteady", is_vital=is_vital)
    loop.start()
    if is_vital:
        loop.join()
        assert isinstance(loop.failure, SystemExit)
        return
    wait_until(lambda: loop.steps > 2, what="it goes on")
    loop.stop(seconds=60)

    assert loop.failure is None
    messages = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert messages == [
        "pgqueue-unsteady has failed, and goes on: SystemExit: from code of the application",
        "pgqueue-unsteady has failed, and goes on: KeyError: 'a row'",
    ]


class Locked(Loop):
    """Waits for a lock that it does not get."""

    def step(self, connection: Connection) -> float:
        with connection.begin():
            connection.exec_driver_sql("SET LOCAL lock_timeout = 1")
            connection.exec_driver_sql("LOCK TABLE pgqueue.jobs")
        return 0.0


def test_a_loop_pauses_after_a_lock_timeout(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the pause it would stand in the lock queue of the server all the time."""
    caplog.set_level("INFO", "pgqueue")
    loop = Locked(engine, {}, Outage(), name="locked", repeat_after=3600)
    with engine.begin() as holder:
        holder.exec_driver_sql("LOCK TABLE pgqueue.jobs")
        loop.start()
        wait_until(lambda: "waiting for a lock" in caplog.text, what="the first step")
        loop.wake(0)  # a wake counts
        wait_until(lambda: caplog.text.count("waiting for a lock") == 2, what="the second step")
        assert caplog.text.count("waiting for a lock") == 2
    loop.stop(seconds=60)
    assert loop.failure is None
