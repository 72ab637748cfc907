"""Both modes on one queue, pauses, unknown tasks, and running until nothing is left."""

import random
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import chores
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session
from worker_rig import MODES, Rig, promised

from pgqueue import Cancel, Job, JobContext, PgQueue, Retry, Snooze, Worker


def test_both_modes_share_a_queue_whatever_is_killed(database_url: str, tmp_path: Path) -> None:
    with Rig(database_url, tmp_path) as rig:
        with rig.session() as session:
            chores.pay.options(max_attempts=1000).enqueue_many(session, [(10,)] * 150)
            chores.pay_async.options(max_attempts=1000).enqueue_many(session, [(10,)] * 150)
            poison = chores.poison.enqueue(session).id
            session.commit()
        dice = random.Random(3)
        alive = {
            mode: rig.start(mode, waits=False, concurrency=2, poll_interval=0.2) for mode in MODES
        }
        last_kill = 300

        def keeps_working() -> bool:
            nonlocal last_kill
            left = rig.unfinished()
            for mode, worker in alive.items():
                if not worker.is_running:  # the poison took it
                    alive[mode] = rig.start(mode, waits=False, concurrency=2, poll_interval=0.2)
            if left and left < last_kill - 80:
                last_kill = left
                alive[dice.choice(MODES)].kill()
            return left == 0

        rig.until(keeps_working, seconds=60, what="all jobs end")

        assert rig.outcomes() == {"succeeded": 300, "failed": 1}
        assert rig.each_success_has_one_effect()
        assert len(rig.notes("start", job=poison)) == 3
        assert rig.most_starts() == 1
        assert rig.check() == []


@pytest.mark.parametrize("mode", MODES)
def test_a_paused_queue_is_passed_by_and_resumed(
    database_url: str, tmp_path: Path, mode: str
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start(mode, poll_interval=0.2, queues=["default", "other"])
        with rig.session() as session:
            rig.queue.pause(session, "default")
            session.commit()
        _until_upkeep_has_looked(rig)
        with rig.session() as session:
            paused = chores.quick.enqueue(session).id
            other = chores.quick.options(queue="other").enqueue(session).id
            session.commit()
        rig.until_ended(other)
        _let_pass(0.5)
        assert rig.notes("start", job=paused) == []

        with rig.session() as session:
            rig.queue.resume(session, "default")
            session.commit()

        rig.until_ended(paused)
        assert rig.check() == []


@pytest.mark.parametrize("mode", MODES)
def test_tasks_a_worker_does_not_know_wait_for_one_that_does(
    database_url: str, tmp_path: Path, mode: str
) -> None:
    with Rig(database_url, tmp_path) as rig:
        newer = PgQueue(rig.engine)

        @newer.task(name="of.a.newer.version")
        def unknown() -> None: ...

        worker = rig.start(mode, poll_interval=0.2)
        with rig.session() as session:
            jobs = unknown.enqueue_many(session, [()] * 50)
            known = chores.quick.enqueue_many(session, [()] * 50)
            session.commit()
        rig.until_ended(*known)
        _let_pass(0.5)
        untouched = "SELECT count(*) FROM pgqueue.message_queue WHERE attempt = 0"
        assert rig.scalar(untouched) == 50
        assert worker.terminate() == 0

        counts = Worker(newer, concurrency=2, mode=mode).run_until_empty(timeout=60)

        assert counts == {"succeeded": len(jobs)}
        assert rig.check() == []


@pytest.mark.parametrize("mode", MODES)
def test_run_until_empty_counts_attempts_by_how_they_ended(engine: Engine, mode: str) -> None:
    queue = PgQueue(engine)

    @queue.task
    def good() -> None: ...

    @queue.task(max_attempts=3, retry=Retry.constant(timedelta(0)))
    def bad() -> None:
        raise ValueError("no")

    @queue.task
    def cancels() -> Cancel:
        return Cancel("no need")

    @queue.task
    def snoozes() -> Snooze:
        return Snooze(timedelta(hours=1))

    with queue.session() as session:
        for task in (good, good, bad, cancels, snoozes):
            task.enqueue(session)
        session.commit()

    counts: Counter[str] = Counter()
    for _ in range(20):  # a retry is due a moment after the worker has found nothing
        counts.update(Worker(queue, concurrency=2, mode=mode).run_until_empty(timeout=60))
        if counts["failed"]:
            break

    with queue.session() as session:
        assert counts == {"succeeded": 2, "retried": 2, "failed": 1, "cancelled": 1, "snoozed": 1}
        assert queue.check(session) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("concurrency", [1, 4])
def test_run_until_empty_waits_for_what_its_jobs_enqueue(
    engine: Engine, mode: str, concurrency: int
) -> None:
    queue = PgQueue(engine)

    @queue.task
    def chain(session: Session, ctx: JobContext, links: int) -> None:
        if links > 1:
            chain.enqueue(session, links - 1)

    @queue.task
    def loose_chain(links: int) -> None:
        if links > 1:
            loose_chain.delay(links - 1)

    with queue.session() as session:
        chain.enqueue(session, 20)
        loose_chain.enqueue(session, 20)
        session.commit()

    counts = Worker(queue, concurrency=concurrency, mode=mode).run_until_empty(timeout=60)

    with queue.session() as session:
        assert counts == {"succeeded": 40}
        assert queue.check(session) == []


@pytest.mark.parametrize("mode", MODES)
def test_run_until_empty_leaves_what_is_not_due(engine: Engine, mode: str) -> None:
    queue = PgQueue(engine)

    @queue.task
    def quick() -> None: ...

    with queue.session() as session:
        quick.options(delay=timedelta(hours=1)).enqueue(session)
        quick.enqueue(session)
        session.commit()

    counts = Worker(queue, mode=mode).run_until_empty(timeout=60)

    with queue.session() as session:
        assert counts == {"succeeded": 1}
        assert session.scalar(text("SELECT count(*) FROM pgqueue.message_queue")) == 1
        assert queue.check(session) == []


@pytest.mark.timed
@pytest.mark.parametrize("mode", MODES)
def test_run_until_empty_stops_at_its_timeout(engine: Engine, mode: str) -> None:
    queue = PgQueue(engine)

    @queue.task
    def brief() -> None:
        time.sleep(0.01)

    with queue.session() as session:
        brief.enqueue_many(session, [()] * 2000)
        session.commit()

    began = time.monotonic()
    counts = Worker(queue, concurrency=1, mode=mode).run_until_empty(timeout=3)
    took = time.monotonic() - began

    with queue.session() as session:
        assert took < promised(6)
        assert 0 < counts["succeeded"] < 2000
        unfinished = text("SELECT count(*) FROM pgqueue.jobs WHERE outcome IS NULL")
        assert session.scalar(unfinished) == 2000 - counts["succeeded"]
        assert session.query(Job).filter(Job.attempts > 1).count() == 0
        assert queue.check(session) == []


@pytest.mark.parametrize("mode", MODES)
def test_one_worker_object_runs_again_and_again(engine: Engine, mode: str) -> None:
    queue = PgQueue(engine)

    @queue.task
    def quick() -> None: ...

    worker = Worker(queue, concurrency=2, mode=mode)
    counts = []
    for _ in range(3):
        quick.delay()
        counts.append(worker.run_until_empty(timeout=60))

    with queue.session() as session:
        assert counts == [{"succeeded": 1}] * 3
        assert session.scalar(text("SELECT count(*) FROM pgqueue.workers")) == 0
        assert queue.check(session) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_paused_task_is_passed_by_in_its_queue_and_resumed(
    database_url: str, tmp_path: Path, mode: str
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start(mode, poll_interval=0.2)
        with rig.session() as session:
            rig.queue.pause_task(session, chores.pay.name)
            session.commit()
        _until_upkeep_has_looked(rig)
        with rig.session() as session:
            paused = chores.pay.enqueue_many(session, [()] * 2000)
            others = chores.quick.enqueue_many(session, [()] * 50)
            session.commit()
        rig.until_ended(*others)
        _let_pass(0.5)
        assert rig.scalar("SELECT count(*) FROM pgqueue.message_queue") == len(paused)

        with rig.session() as session:
            rig.queue.resume_task(session, chores.pay.name)
            session.commit()

        rig.until_ended(*paused)
        assert rig.check() == []


def _until_upkeep_has_looked(rig: Rig) -> None:
    """Until the only worker knows what was committed before: what it reads next may be older, its
    first look has two transactions, and what the next one has read it knows by the one after."""
    ended = """
        SELECT max(query_start) FILTER (WHERE state = 'idle') FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE '% worker % upkeep'
    """
    for _ in range(4):
        before = rig.scalar(ended)
        rig.until(lambda before=before: rig.scalar(ended) not in (None, before))  # type: ignore[misc]


def _let_pass(seconds: float) -> None:
    """That nothing happens can only be seen by waiting for it."""
    time.sleep(seconds)
