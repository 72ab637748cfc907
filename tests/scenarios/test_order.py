"""Who starts first: by priority, also those that must not wait in a worker."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from chaos.workers import PATIENCE
from pgqueue import PgQueue
from pgqueue.options import OptionsOfWorker
from pgqueue.worker import Worker

SLOTS = 4
BACKLOG = 3000
SPECIAL = 200


class Starts:
    """A task that records the order in which its jobs start."""

    def __init__(self, engine: Engine) -> None:
        self.queue = PgQueue(engine)
        self.kinds: list[str] = []

        @self.queue.task(name="start")
        def start(kind: str) -> None:
            self.kinds.append(kind)

        self.task = start

    def enqueue(self, kind: str, count: int, **options: Any) -> list[int]:
        with self.queue.session() as session:
            ids = self.task.options(**options).enqueue_many(session, [(kind,)] * count)
            session.commit()
        return ids

    def run(self, **options: Any) -> None:
        worker = Worker(self.queue, concurrency=SLOTS, **options)
        worker.run_until_empty(timeout=PATIENCE)

    def before_middle(self, kind: str) -> int:
        """How many of the others had started when half of this kind had.

        The last may come late where the machine stands still.
        """
        places = [place for place, each in enumerate(self.kinds) if each == kind]
        return sum(other != kind for other in self.kinds[: places[len(places) // 2]])


def test_urgent_jobs_of_one_attempt_wait_for_no_more_than_one_claim_ahead(engine: Engine) -> None:
    starts = Starts(engine)
    starts.enqueue("later", BACKLOG, priority=9)
    starts.enqueue("urgent", SPECIAL, priority=0, max_attempts=1)

    starts.run()

    assert starts.before_middle("urgent") < OptionsOfWorker().ahead + SLOTS


def test_jobs_of_one_attempt_do_not_wait_for_a_backlog_of_their_priority(engine: Engine) -> None:
    starts = Starts(engine)
    starts.enqueue("others", BACKLOG)
    starts.enqueue("one attempt", SPECIAL, max_attempts=1)
    starts.enqueue("behind", BACKLOG)

    starts.run()

    # A claim ahead may have brought some of those that stand behind them.
    assert starts.before_middle("one attempt") < 1.5 * BACKLOG


def test_with_nothing_ahead_jobs_are_claimed_for_free_slots_only(engine: Engine) -> None:
    starts = Starts(engine)
    starts.enqueue("quick", SPECIAL)

    with noted_looks() as looks:
        starts.run(ahead=0)

    assert looks.count("claim") >= SPECIAL // SLOTS


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def noted_looks() -> Iterator[list[str]]:
    """What workers ask of the messages: "claim" or "read".  They have engines of their own."""
    looks: list[str] = []

    def note(*arguments: Any) -> None:
        if "DELETE FROM pgqueue.message_queue" in arguments[2]:
            looks.append("claim")
        elif "AS is_due" in arguments[2]:
            looks.append("read")

    event.listen(Engine, "before_cursor_execute", note)
    yield looks
    event.remove(Engine, "before_cursor_execute", note)


@pytest.mark.journey
def test_a_worker_that_sleeps_reads_at_each_poll_whether_anything_is_due(engine: Engine) -> None:
    starts = Starts(engine)
    worker = Worker(starts.queue, concurrency=SLOTS, poll_interval=timedelta(seconds=0.2))
    running = Thread(target=worker.run)

    with noted_looks() as looks, engine.connect() as connection:
        starts.enqueue("first", 1)
        running.start()
        until(lambda: starts.kinds == ["first"])
        connection.execute(text("SELECT pg_sleep(1.5)"))  # by then it sleeps
        before = len(looks)
        connection.execute(text("SELECT pg_sleep(2)"))
        asked = looks[before:]
        starts.enqueue("second", 1)
        until(lambda: starts.kinds == ["first", "second"])
        worker.stop()
        running.join(PATIENCE)

    # Where a read takes long, a claim is made as well; there is no poll of claims alone.
    assert asked.count("read") > 0
    assert asked.count("claim") <= asked.count("read") + 1


@pytest.mark.journey
def test_a_worker_whose_slots_are_all_busy_does_not_look_for_more_without_a_pause(
    engine: Engine,
) -> None:
    starts, gate = Starts(engine), Event()
    all_wait = threading.Barrier(SLOTS + 1)

    @starts.queue.task(name="wait")
    def wait() -> None:
        all_wait.wait(PATIENCE)
        gate.wait(PATIENCE)

    starts.enqueue("quick", BACKLOG, priority=0)  # they teach the worker to claim ahead
    for _ in range(SLOTS):
        wait.delay()
    worker = Worker(starts.queue, concurrency=SLOTS, poll_interval=timedelta(seconds=0.2))
    running = Thread(target=worker.run)

    with noted_looks() as looks:
        running.start()
        all_wait.wait(PATIENCE)
        before = len(looks)
        with engine.connect() as connection:
            connection.execute(text("SELECT pg_sleep(1.5)"))
        looked = len(looks) - before
        gate.set()
        worker.stop()
        running.join(PATIENCE)

    assert 0 < looked < 60, "every poll interval, and some before it falls asleep"
