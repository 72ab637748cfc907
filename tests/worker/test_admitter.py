"""Workers admit jobs: up to the capacity, as it is changed, and when workers end."""

import signal
from pathlib import Path
from typing import Any

import limited_tasks
import pytest
from sqlalchemy import Engine, text
from worker_rig import Rig

from pgqueue import Job, JobStatus, Limit, PgQueue, Worker
from pgqueue.repository.limits import Limits

pytestmark = pytest.mark.journey

OPTIONS: dict[str, Any] = {"modules": ["limited_tasks"], "poll_interval": 0.2, "concurrency": 6}


def started(rig: Rig) -> int:
    return len(rig.notes("start"))


def enqueue(rig: Rig, *gates: str, key: str = "red") -> list[int]:
    with rig.session() as session:
        jobs = limited_tasks.gated.enqueue_many(session, [(key, gate) for gate in gates])
        session.commit()
        return jobs


def set_limit(rig: Rig, capacity: int | None) -> None:
    with rig.session() as session:
        rig.queue.set_limit(session, "limited_tasks.gated:key", capacity)
        session.commit()


def with_status(rig: Rig, status: JobStatus) -> int:
    with rig.session() as session:
        return session.query(Job).where(Job.status == status).count()


def test_a_limit_is_used_up_and_changed_while_workers_run(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        for _ in range(2):
            rig.start(**OPTIONS)
        enqueue(rig, *"abcdefgh")
        rig.until(lambda: started(rig) == 2, what="two start")
        assert with_status(rig, JobStatus.RUNNING) == 2
        assert with_status(rig, JobStatus.BLOCKED) == 6

        set_limit(rig, 4)
        rig.until(lambda: started(rig) == 4, what="four run")

        set_limit(rig, 1)
        running = [note["job"] for note in rig.notes("start")]
        gates = dict(zip(enqueue_order(rig), "abcdefgh", strict=True))
        for job in running[:3]:
            rig.open(gates[job])
            rig.until_ended(job)
        assert started(rig) == 4  # one still runs

        set_limit(rig, None)
        rig.until(lambda: started(rig) == 5, what="the capacity of the code holds again")
        for gate in "abcdefgh":
            rig.open(gate)
        rig.until_ended()
        assert rig.check() == []


def enqueue_order(rig: Rig) -> list[int]:
    return [row[0] for row in rig.rows("SELECT id FROM pgqueue.jobs ORDER BY id")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "stop"])
def test_the_places_of_a_worker_that_ends_are_used_by_others(
    database_url: str, tmp_path: Path, number: signal.Signals
) -> None:
    with Rig(database_url, tmp_path) as rig:
        ending = rig.start(grace=0, by_command=True, **OPTIONS)
        jobs = enqueue(rig, *"aabb")
        rig.until(lambda: started(rig) == 2, what="two start")
        rig.start(**OPTIONS)
        if number == signal.SIGKILL:
            ending.kill()
        else:
            ending.terminate()

        rig.until(lambda: started(rig) == 4, what="both start again")
        assert {note["job"] for note in rig.notes("start")} == set(jobs[:2])
        rig.open("a")
        rig.until(lambda: started(rig) == 6, what="the others start")
        rig.open("b")
        rig.until_ended()

        assert rig.outcomes() == {"succeeded": 4}
        assert rig.check() == []


def test_a_worker_that_ends_when_no_job_is_left_admits_the_last_one_first(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAOS_DIRECTORY", str(tmp_path))
    with Rig(database_url, tmp_path) as rig:
        with rig.session() as session:
            rows = [(key, 0) for _ in range(10) for key in ("red", "green")]
            limited_tasks.one_of_a_key.enqueue_many(session, rows)
            limited_tasks.one_of_a_key.options(queue="elsewhere").enqueue(session, "red")
            session.commit()

        counts = Worker(rig.queue, ["default"]).run_until_empty(timeout=60)

        assert counts["succeeded"] == 20
        assert with_status(rig, JobStatus.BLOCKED) == 1


def test_jobs_of_a_limit_that_the_code_has_no_more_are_admitted(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        with rig.session() as session:
            limited_tasks.one_of_a_key.enqueue_many(session, [("red", 0)] * 3)
            session.commit()
        declared = rig.queue.limited.limits.values()
        with rig.engine.begin() as connection:
            Limits(connection).declare(declared)

        later = PgQueue(rig.engine)
        later.task(name=limited_tasks.one_of_a_key.name)(lambda key, milliseconds=1: None)

        assert Worker(later).run_until_empty(timeout=60) == {"succeeded": 3}


UNDER_ITS_OLD_NAME = """
    WITH job AS (
        UPDATE pgqueue.jobs SET task = 'old' WHERE id = :id
        RETURNING limit_keys, queue, priority, run_at, id, task
    ), message AS (
        INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task, alone)
        SELECT queue, priority, run_at, id, task, true FROM job
    ), waiting AS (
        DELETE FROM pgqueue.waiting_messages WHERE target_id = :id
    )
    INSERT INTO pgqueue.limit_places (limit_key, job_id) SELECT limit_keys, id FROM job
"""
"""Admitted by an earlier release, in which the task had another name."""


def test_a_paused_task_gives_the_places_of_jobs_under_its_old_name_back(engine: Engine) -> None:
    queue = PgQueue(engine)

    @queue.task(name="new", aliases=("old",), limit=Limit(1, name="bus"))
    def renamed() -> None: ...

    @queue.task(name="other", limit=Limit(1, name="bus"))
    def other() -> None: ...

    with queue.session() as session:
        session.execute(text(UNDER_ITS_OLD_NAME), {"id": renamed.enqueue(session).id})
        queue.pause_task(session, "new")
        other.enqueue(session)
        session.commit()

    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}
    with queue.session() as session:
        assert queue.check(session) == []
        queue.resume_task(session, "new")
        session.commit()
    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}


def test_a_job_that_a_rate_blocks_starts_when_its_token_comes_not_at_the_next_poll(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start(**{**OPTIONS, "poll_interval": 3600})
        with rig.session() as session:
            limited_tasks.spaced.enqueue_many(session, [()] * 5)
            session.commit()

        rig.until_ended()

        began = [note["at"] for note in rig.notes("start")]
        assert max(began) - min(began) > 0.3  # four spacings, and the moment from claim to note


REFUSES_ONE = """
    CREATE FUNCTION refuse_one() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.target_id = 1 THEN RAISE EXCEPTION 'not this one'; END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER refuse_one BEFORE INSERT ON pgqueue.message_queue
    FOR EACH ROW EXECUTE FUNCTION refuse_one()
"""
"""A trigger of the application."""


def test_a_job_that_the_database_refuses_stops_no_other_key_and_is_logged_once(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    queue = PgQueue(engine)

    @queue.task(name="pay", limit=Limit(1, by="account"))
    def pay(account: int) -> None: ...

    with queue.session() as session:
        session.execute(text(REFUSES_ONE))
        pay.enqueue_many(session, [(account,) for account in range(30)] * 2)
        session.commit()

    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 58}
    said = [record for record in caplog.records if "not this one" in record.getMessage()]
    assert len(said) == 1
    assert "pay:account [0]" in said[0].getMessage()


def test_one_job_of_a_key_starts_before_the_backlog_of_another(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        rig.start(**{**OPTIONS, "concurrency": 2})
        with rig.session() as session:
            rows = [("red", f"red{number}") for number in range(9)]
            limited_tasks.in_turns.enqueue_many(session, rows)
            session.commit()
        rig.until(lambda: started(rig) == 2, what="two start")
        ready = "SELECT count(DISTINCT job_id) FROM pgqueue.limit_places"
        rig.until(lambda: rig.rows(ready) == [(4,)], what="two are ready")
        with rig.session() as session:
            limited_tasks.in_turns.enqueue(session, "green", "green")
            session.commit()

        for number in range(3):
            rig.open(f"red{number}")
            rig.until(lambda: started(rig) == 3 + number, what="the next starts")

        assert [note["key"] for note in rig.notes("start")] == ["red"] * 4 + ["green"]
        rig.open("green")
        for number in range(9):
            rig.open(f"red{number}")
        rig.until_ended()
        assert rig.check() == []


def test_all_slots_of_all_workers_are_used_though_only_a_few_jobs_are_ready(
    database_url: str, tmp_path: Path
) -> None:
    with Rig(database_url, tmp_path) as rig:
        for _ in range(3):
            rig.start(**{**OPTIONS, "concurrency": 4, "poll_interval": 60})
        with rig.session() as session:
            rows = [(f"key{number % 3}", "gate") for number in range(20)]
            limited_tasks.in_turns.enqueue_many(session, rows)
            session.commit()

        rig.until(lambda: started(rig) == 12, what="all slots are busy")

        rig.open("gate")
        rig.until_ended()
