"""Queues with weights, and jobs that count as more urgent while they wait: with real workers."""

import time
from datetime import timedelta
from threading import Event, Lock
from typing import Any

import pytest
from sqlalchemy import Engine, text
from test_order import noted_looks, until
from worker_rig import running

from chaos.workers import PATIENCE
from pgqueue import Job, Limit, PgQueue, Worker

pytestmark = pytest.mark.journey

SECOND = timedelta(seconds=1)


class Kinds:
    """A task that records the order in which its jobs start, and takes some seconds."""

    def __init__(self, engine: Engine, *, takes: float = 0.0, **options: Any) -> None:
        self.queue = PgQueue(engine, **options)
        self.order: list[str] = []

        @self.queue.task(name="start")
        def start(kind: str) -> None:
            self.order.append(kind)
            time.sleep(takes)

        self.task = start

    def enqueue(self, kind: str, count: int, **options: Any) -> None:
        with self.queue.session() as session:
            self.task.options(**options).enqueue_many(session, [(kind,)] * count)
            session.commit()

    def worker(self, **options: Any) -> Worker:
        options = {"concurrency": 1, "poll_interval": SECOND / 5, **options}
        return Worker(self.queue, **options)


def make_older(engine: Engine, span: timedelta) -> None:
    with engine.begin() as connection:
        for table in ("jobs", "message_queue"):
            moved = text(f"UPDATE pgqueue.{table} SET run_at = run_at - :span")
            connection.execute(moved, {"span": span})


class TestWeights:
    def test_queues_share_the_starts_in_proportion(self, engine: Engine) -> None:
        kinds = Kinds(engine, takes=0.002)
        weights = {"mail": 3, "reports": 2, "other": 1}
        for name in weights:
            kinds.enqueue(name, 120, queue=name)

        kinds.worker(queues=weights).run_until_empty(timeout=PATIENCE)

        # One turn is as many jobs as are claimed ahead: 20 ms of work.
        assert len(kinds.order) == 360
        for queue, weight in weights.items():
            assert kinds.order[:180].count(queue) == pytest.approx(30 * weight, abs=15), queue

    def test_without_weights_the_urgent_jobs_of_all_queues_are_first(self, engine: Engine) -> None:
        kinds = Kinds(engine)
        kinds.enqueue("mail", 20, queue="mail", priority=5)
        kinds.enqueue("reports", 20, queue="reports", priority=0)

        kinds.worker(queues=["mail", "reports"]).run_until_empty(timeout=PATIENCE)

        assert kinds.order == ["reports"] * 20 + ["mail"] * 20

    @pytest.mark.journey
    def test_less_urgent_jobs_of_a_queue_start_in_its_turns(self, engine: Engine) -> None:
        kinds = Kinds(engine)
        mails = 20_000
        kinds.enqueue("mail", mails, queue="mail", priority=0)
        kinds.enqueue("urgent report", 10, queue="reports", priority=3)
        kinds.enqueue("report", 60, queue="reports", priority=9)

        worker = kinds.worker(queues={"mail": 1, "reports": 1})
        worker.run_until_empty(timeout=PATIENCE)

        reports = [kind for kind in kinds.order if kind != "mail"]
        assert reports == ["urgent report"] * 10 + ["report"] * 60
        # The urgent mails of later claims ahead hold them up for a while.
        last = len(kinds.order) - 1 - kinds.order[::-1].index("report")
        assert last < mails // 4

    def test_empty_and_paused_queues_leave_their_share_to_the_others(self, engine: Engine) -> None:
        kinds = Kinds(engine)
        kinds.enqueue("mail", 50, queue="mail")
        kinds.enqueue("paused", 50, queue="paused")
        with kinds.queue.session() as session:
            kinds.queue.pause(session, "paused")
            session.commit()

        weights = {"mail": 1, "paused": 500, "empty": 500}
        with noted_looks() as looks:
            kinds.worker(queues=weights, concurrency=10).run_until_empty(timeout=PATIENCE)

        assert kinds.order == ["mail"] * 50
        assert looks.count("claim") < 50

    def test_a_limit_of_a_queue_holds_within_its_share(self, engine: Engine) -> None:
        kinds = Kinds(engine, queue_limits={"mail": Limit(1)})
        lock, most, at_once = Lock(), 0, 0

        @kinds.queue.task(queue="mail")
        def mail() -> None:
            nonlocal most, at_once
            with lock:
                at_once += 1
                most = max(most, at_once)
            kinds.order.append("mail")
            with lock:
                at_once -= 1

        with kinds.queue.session() as session:
            mail.enqueue_many(session, [()] * 20)
            session.commit()
        kinds.enqueue("reports", 20, queue="reports")
        worker = kinds.worker(queues={"mail": 9, "reports": 1}, concurrency=4)

        assert worker.run_until_empty(timeout=PATIENCE) == {"succeeded": 40}
        assert most == 1


class TestAges:
    @pytest.mark.journey
    def test_a_steady_flow_of_urgent_jobs_holds_up_no_aged_job(self, engine: Engine) -> None:
        """Each urgent job leaves another one that is due, so one always is."""
        kinds = Kinds(engine)
        done = Event()

        @kinds.queue.task(priority=0)
        def urgent() -> None:
            kinds.order.append("urgent")
            if not done.is_set():
                urgent.delay()

        @kinds.queue.task(priority=2)
        def low() -> None:
            kinds.order.append("low")
            done.set()

        with kinds.queue.session() as session:
            urgent.enqueue_many(session, [()] * 50)
            low_id = low.enqueue(session).id
            session.commit()

        with running(kinds.worker(age_after=SECOND)):
            until(done.is_set)

        with kinds.queue.session() as session:
            assert session.get_one(Job, low_id).priority == 2

    def test_an_aged_backlog_leaves_every_second_claim_to_the_urgent_jobs(
        self, engine: Engine
    ) -> None:
        kinds = Kinds(engine)
        kinds.enqueue("low", 400, priority=9)
        make_older(engine, timedelta(minutes=5))
        kinds.enqueue("urgent", 10, priority=0)

        kinds.worker(age_after=SECOND).run_until_empty(timeout=PATIENCE)

        assert len(kinds.order) == 410
        last_urgent = 409 - kinds.order[::-1].index("urgent")
        assert kinds.order.index("low") < last_urgent < 100
