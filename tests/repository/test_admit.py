"""Admission against the database: places are taken only here, and given back by everything."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import (
    ERROR,
    TASK,
    TASKS,
    LogicalWorker,
    committed,
    declare_dead,
    enqueue,
    execute,
    rescue,
    status_of,
    violations,
    wait_until,
    worker_settings,
    workers_at,
)
from chaos.plans import AUTO_EXPLAIN, plans_of, prepare_at_once
from pgqueue import Change, Job, JobStatus, Limit, PgQueue
from pgqueue.errors import OptionError
from pgqueue.outcomes import (
    Failed,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Succeeded,
)
from pgqueue.repository import claim as claiming
from pgqueue.repository import enqueue as enqueueing
from pgqueue.repository import settle as settling
from pgqueue.repository.admit import Admissions
from pgqueue.repository.enqueue import Enqueues, NewJob
from pgqueue.repository.limits import Limits
from pgqueue.repository.messages import Start
from pgqueue.repository.workers import NOTHING_PAUSED, Paused
from pgqueue.rules.admission import LimitRule
from pgqueue.worker.duties.admission_rounds import AdmissionRounds

RULES = {
    "bank": LimitRule(1),
    "task": LimitRule(2),
    "strict": LimitRule(1, is_strict=True),
    "skip": LimitRule(1, is_strict=True, skips_failed=True),
    "fair": LimitRule(1_000_000, is_fair=True),
}
HOUR = timedelta(hours=1)


def put(executor: Any, keys: str = "bank", **more: Any) -> int:
    """Enqueue a job under limits; its id."""
    values = {"queue": "default", "priority": 5, "max_attempts": 10, "notify": False, **more}
    new = NewJob(task=values.pop("task", TASK), **values)
    return Enqueues(executor).enqueue(new, "{}", unique_key=None, limit_keys=keys).id


def put_some(engine: Engine, count: int, keys: str = "bank", **more: Any) -> list[int]:
    with engine.begin() as connection:
        return [put(connection, keys, **more) for _ in range(count)]


def rounds(paused: Paused = NOTHING_PAUSED) -> AdmissionRounds:
    return AdmissionRounds(
        lambda: ["default", "other"],
        lambda: paused,
        lambda: TASKS,
        notify=False,
        most_ready=2,
        own=RULES,
    )


def admit(engine: Engine, *, paused: Paused = NOTHING_PAUSED) -> int:
    return run_round(engine, rounds(paused))


def run_round(engine: Engine, admitting_rounds: AdmissionRounds) -> int:
    """Run one round, as a worker does; how many jobs it has admitted."""
    admitting_rounds.begin()
    admitted = 0
    while True:
        with engine.begin() as connection:
            step = admitting_rounds.step(connection)
        admitted += step.admitted
        if step.is_last:
            return admitted


def held(engine: Engine, key: str = "bank") -> list[int]:
    """The jobs that hold a place."""
    with engine.connect() as connection:
        places = Admissions(connection).places_under([key], paused=NOTHING_PAUSED)
        return [place.job_id for place in places if place.is_held]


def test_a_job_under_a_limit_is_blocked_until_it_is_admitted(
    engine: Engine, worker: LogicalWorker
) -> None:
    first, second = put_some(engine, 2)
    assert worker.claim(10) == []
    assert status_of(engine, first) is JobStatus.BLOCKED

    assert admit(engine) == 1

    assert (status_of(engine, first), status_of(engine, second)) == (
        JobStatus.PENDING,
        JobStatus.BLOCKED,
    )
    [claimed] = worker.claim(10)
    assert (claimed.job_id, status_of(engine, first)) == (first, JobStatus.RUNNING)
    assert admit(engine) == 0
    assert violations(engine) == []


ENDINGS: dict[str, Outcome] = {
    "succeeded": Succeeded(),
    "succeeded with a result": Succeeded({"sum": 3}),
    "failed": Failed(ERROR),
    "retried later": Retried(HOUR, ERROR),
}


@pytest.mark.parametrize("outcome", ENDINGS.values(), ids=ENDINGS)
def test_a_settle_gives_the_place_back(
    engine: Engine, worker: LogicalWorker, outcome: Outcome
) -> None:
    first, second = put_some(engine, 2)
    admit(engine)
    worker.run_next(outcome)

    assert admit(engine) == 1

    assert held(engine) == [second]
    assert status_of(engine, first) is not JobStatus.PENDING
    assert violations(engine) == []


@pytest.mark.parametrize("outcome", [Released(), Retried(None, ERROR)], ids=["released", "retried"])
def test_a_job_that_starts_again_at_once_keeps_its_place(
    engine: Engine, worker: LogicalWorker, outcome: Outcome
) -> None:
    first, _ = put_some(engine, 2)
    admit(engine)
    worker.run_next(outcome)

    assert admit(engine) == 0
    assert held(engine) == [first]
    assert [one.job_id for one in worker.claim(10)] == [first]


def test_a_rescued_job_keeps_its_place_until_it_has_ended(engine: Engine) -> None:
    first, second = put_some(engine, 2)
    with workers_at(engine, 2) as [dead, worker]:
        admit(engine)
        assert [one.job_id for one in dead.claim()] == [first]
        declare_dead(engine, dead)
        assert admit(engine) == 0
        assert rescue(engine) == {first: None}

        assert admit(engine) == 0
        [claimed] = worker.claim(10)
        assert (claimed.job_id, claimed.attempt) == (first, 2)
        assert worker.settle(claimed, Succeeded())

        assert admit(engine) == 1
        assert held(engine) == [second]
    assert violations(engine) == []


def cancel(session: Session, job_id: int) -> None:
    assert PgQueue().cancel(session, job_id) is Change.CANCELLED


def delete(session: Session, job_id: int) -> None:
    session.delete(session.get_one(Job, job_id))


@pytest.mark.parametrize("change", [cancel, delete])
@pytest.mark.parametrize("is_admitted", [True, False], ids=["admitted", "waits"])
def test_a_job_that_is_cancelled_or_deleted_gives_its_place_or_its_wait_up(
    engine: Engine, change: Callable[[Session, int], None], is_admitted: bool
) -> None:
    first, second = put_some(engine, 2)
    if is_admitted:
        admit(engine)
    with Session(engine) as session:
        change(session, first)
        session.commit()

    assert admit(engine) == 1
    assert held(engine) == [second]
    assert violations(engine) == []


def test_a_running_job_that_is_to_be_cancelled_keeps_its_place_until_it_has_ended(
    engine: Engine, worker: LogicalWorker
) -> None:
    first, second = put_some(engine, 2)
    admit(engine)
    [claimed] = worker.claim()
    assert committed(engine, PgQueue().cancel, first) is Change.CANCEL_REQUESTED
    assert admit(engine) == 0

    worker.settle(claimed, Succeeded())

    assert admit(engine) == 1
    assert held(engine) == [second]


def test_a_requeued_job_waits_for_its_limits_again(engine: Engine, worker: LogicalWorker) -> None:
    [job] = put_some(engine, 1)
    admit(engine)
    worker.run_next(Failed(ERROR))
    assert committed(engine, PgQueue().requeue, job) is Change.REQUEUED

    assert status_of(engine, job) is JobStatus.BLOCKED
    assert worker.claim() == []
    assert admit(engine) == 1
    assert [one.attempt for one in worker.claim()] == [1]
    assert violations(engine) == []


def test_run_now_lets_a_delayed_job_be_admitted(engine: Engine) -> None:
    [job] = put_some(engine, 1, delay=HOUR)
    assert admit(engine) == 0
    with engine.begin() as connection:
        assert PgQueue().run_now(connection, job) is Change.DUE_NOW
        assert PgQueue().run_now(connection, job) is Change.UNCHANGED

    assert admit(engine) == 1
    assert violations(engine) == []


def test_a_retry_keeps_its_count_of_attempts_while_it_waits(
    engine: Engine, worker: LogicalWorker
) -> None:
    first, second = put_some(engine, 2)
    admit(engine)
    worker.run_next(Retried(HOUR, ERROR))
    admit(engine)
    assert (status_of(engine, first), held(engine)) == (JobStatus.BLOCKED, [second])
    worker.run_next(Succeeded())
    committed(engine, PgQueue().run_now, first)

    assert admit(engine) == 1
    assert [(one.job_id, one.attempt) for one in worker.claim()] == [(first, 2)]


@pytest.mark.parametrize(("key", "starts"), [("strict", "first"), ("skip", "second")])
def test_the_rule_for_a_failed_head_decides_whether_others_pass(
    engine: Engine, worker: LogicalWorker, key: str, starts: str
) -> None:
    first, second = put_some(engine, 2, key)
    admit(engine)
    worker.run_next(Retried(HOUR, ERROR))

    admit(engine)

    assert held(engine, key) == [{"first": first, "second": second}[starts]]


@pytest.mark.parametrize("is_admitted", [True, False])
def test_a_job_of_a_strict_key_that_is_put_off_leaves_its_turn_to_the_next(
    engine: Engine, is_admitted: bool
) -> None:
    first, second = put_some(engine, 2, "strict")
    if is_admitted:
        admit(engine)
        assert held(engine, "strict") == [first]

    with engine.begin() as connection:
        changed = PgQueue().change(connection, first, delay=timedelta(hours=1))
    admit(engine)

    assert changed is Change.CHANGED
    assert held(engine, "strict") == [second]
    assert violations(engine) == []


def test_a_strict_key_passes_on_when_its_head_has_failed_for_good(
    engine: Engine, worker: LogicalWorker
) -> None:
    _, second = put_some(engine, 2, "strict")
    admit(engine)
    worker.run_next(Failed(ERROR))

    assert admit(engine) == 1
    assert held(engine, "strict") == [second]


def test_a_job_needs_room_in_each_of_its_limits(engine: Engine, worker: LogicalWorker) -> None:
    put_some(engine, 2, "bank\ntask")
    [other] = put_some(engine, 1, "task")

    assert admit(engine) == 2
    assert len(held(engine, "task")) == 2
    assert other in held(engine, "task")
    assert len(held(engine, "bank")) == 1


def test_only_one_transaction_admits_at_a_time(engine: Engine) -> None:
    """Without the lock, the second would find the place still free, and admit the second job."""
    first, _ = put_some(engine, 2)
    counts: list[int] = []
    with engine.begin() as connection:
        assert rounds().step(connection).admitted == 1
        thread = threading.Thread(target=lambda: counts.append(admit(engine)))
        thread.start()
        waits = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        wait_until(lambda: connection.scalar(waits) == 1)

    thread.join()
    assert counts == [0]
    assert held(engine) == [first]


def test_a_job_whose_row_is_locked_holds_up_no_other(engine: Engine) -> None:
    first, second = put_some(engine, 2)
    with engine.begin() as connection:
        connection.execute(
            text("SELECT FROM pgqueue.jobs WHERE id = :id FOR UPDATE"), {"id": first}
        )
        assert admit(engine) == 1

    assert held(engine) == [second]
    assert violations(engine) == []


def test_a_cancel_that_is_not_committed_holds_up_no_other(engine: Engine) -> None:
    first, second = put_some(engine, 2)
    with engine.begin() as connection:
        PgQueue().cancel(connection, first)
        assert admit(engine) == 1

    assert held(engine) == [second]


def test_many_jobs_whose_rows_are_locked_are_stepped_over_in_few_steps(engine: Engine) -> None:
    locked = put_some(engine, 200)
    [free] = put_some(engine, 1)
    with engine.connect() as other:
        ids = f"SELECT id FROM pgqueue.jobs WHERE id <= {locked[-1]} FOR UPDATE"
        other.execute(text(ids))
        admitting_rounds, steps = rounds(), 0
        while not held(engine):
            with engine.begin() as connection:
                admitting_rounds.step(connection)
            steps += 1
            assert steps <= 10
    assert held(engine) == [free]


ENDED = "UPDATE pgqueue.jobs SET outcome = 'cancelled', finished_at = now() WHERE id = :id"
GONE = "DELETE FROM pgqueue.jobs WHERE id = :id"


@pytest.mark.parametrize("by", [ENDED, GONE], ids=["ended", "gone"])
def test_a_waiting_message_that_has_lost_its_job_holds_up_no_other(engine: Engine, by: str) -> None:
    """So the version before cancels and deletes: it knows no waiting messages."""
    first, second = put_some(engine, 2, "strict")
    execute(engine, by, id=first)

    assert admit(engine) == 1
    assert held(engine, "strict") == [second]
    with engine.connect() as connection:
        assert not connection.execute(text("SELECT target_id FROM pgqueue.waiting_messages")).all()


@pytest.mark.parametrize("change", ["priority = 1", "run_at = run_at - interval '1 s'"])
def test_a_waiting_message_that_stands_elsewhere_than_its_job_holds_up_no_other(
    engine: Engine, change: str
) -> None:
    """So plain SQL leaves it; ``check`` reports it.  A worker does not look at it without end."""
    first, second = put_some(engine, 2)
    with engine.begin() as connection:
        moved = f"UPDATE pgqueue.jobs SET {change} WHERE id = :id"
        connection.execute(text(moved), {"id": first})
    admitting_rounds, steps = rounds(), 0

    is_last = False
    while not is_last:
        with engine.begin() as connection:
            is_last = admitting_rounds.step(connection).is_last
        steps += 1
        assert steps <= 10

    assert held(engine) == [second]


def test_a_limit_that_has_become_strict_lets_one_job_run_whatever_was_set_before(
    engine: Engine,
) -> None:
    queue = PgQueue()
    with engine.begin() as connection:
        Limits(connection).declare([Limit(5, name="bus")])
        queue.set_limit(connection, "bus", 3)
        Limits(connection).declare([Limit(1, name="bus", order="strict")])
        assert [(one.name, one.capacity) for one in queue.limits(connection)] == [("bus", 1)]
    put_some(engine, 3, "bus")

    assert admit(engine) == 1


@pytest.mark.parametrize(
    ("outcome", "max_attempts"), [(Released(), 1), (Released(), 5), (Retried(None, ERROR), 5)]
)
def test_a_job_with_places_is_claimed_ahead_as_one_without(
    engine: Engine, worker: LogicalWorker, outcome: Outcome, max_attempts: int
) -> None:
    def must_not_wait() -> Any:
        with engine.connect() as connection:
            return connection.execute(text("SELECT alone FROM pgqueue.message_queue")).scalar()

    put_some(engine, 1, max_attempts=max_attempts)
    admit(engine)
    admitted = must_not_wait()
    worker.run_next(outcome)

    assert (admitted, must_not_wait()) == (max_attempts == 1, max_attempts == 1)


def test_an_enqueue_never_waits_for_an_admission(engine: Engine) -> None:
    put_some(engine, 1)
    hasty = worker_settings(engine.url, lock_timeout="1ms")
    with engine.begin() as connection:
        assert rounds().step(connection).admitted == 1
        assert len(put_some(hasty, 3)) == 3
        with hasty.begin() as other:
            enqueue(other)


def test_a_job_of_another_task_or_queue_or_limit_is_left_to_others(engine: Engine) -> None:
    put_some(engine, 1, task="tests.unknown")
    put_some(engine, 1, queue="elsewhere")
    put_some(engine, 1, "undeclared")
    [mine] = put_some(engine, 1)

    assert admit(engine) == 1
    assert held(engine) == [mine]


@pytest.mark.parametrize(
    ("of", "paused"),
    [
        ({"queue": "other"}, Paused(queues=["other"])),
        ({"task": "tests.paused"}, Paused(tasks=["tests.paused"])),
    ],
    ids=["queue", "task"],
)
def test_a_paused_queue_or_task_takes_no_places_and_gives_its_places_back(
    engine: Engine, of: dict[str, str], paused: Paused
) -> None:
    [waits] = put_some(engine, 1, **of)
    with engine.begin() as connection:
        Admissions(connection).admit([waits], notify=False)
    [mine] = put_some(engine, 1)
    assert held(engine) == [waits]

    assert admit(engine, paused=paused) == 1

    assert held(engine) == [mine]
    assert status_of(engine, waits) is JobStatus.BLOCKED
    assert violations(engine) == []


def test_a_job_that_a_worker_starts_meanwhile_is_not_sent_back(
    engine: Engine, worker: LogicalWorker
) -> None:
    [running] = put_some(engine, 1, queue="other")
    admit(engine)
    put_some(engine, 1)
    assert len(worker.claim_in_transaction(queue="other")) == 1

    assert admit(engine, paused=Paused(queues=["other"])) == 0
    assert held(engine) == [running]


def test_jobs_are_admitted_by_priority_and_time_over_all_queues(
    engine: Engine, worker: LogicalWorker
) -> None:
    [late] = put_some(engine, 1)
    [urgent] = put_some(engine, 1, priority=0, queue="other")

    admit(engine)

    assert held(engine) == [urgent]
    assert late != urgent


def test_places_of_ended_jobs_are_swept(engine: Engine, worker: LogicalWorker) -> None:
    for number in range(20):
        put_some(engine, 1, f"task {number}")
    assert admit(engine) == 20
    for claimed in worker.claim(15):
        worker.settle(claimed, Succeeded())
    places = text("SELECT count(*) FROM pgqueue.limit_places")

    with engine.begin() as connection:
        assert rounds().sweep(connection) is False
        assert connection.scalar(places) == 5
    assert violations(engine) == []


class TestRates:
    """``api``: three starts in an hour, two of them at once."""

    @pytest.fixture(autouse=True)
    def _declared(self, engine: Engine) -> None:
        api = Limit(3, name="api", per=HOUR, burst=2)
        with engine.begin() as connection:
            Limits(connection).declare([api, Limit(1, name="strict", order="strict")])

    @staticmethod
    def refill(engine: Engine, tokens: int = 1) -> None:
        """Let so much time pass, for the bucket of ``api``."""
        with engine.begin() as connection:
            earlier = text("UPDATE pgqueue.limit_buckets SET full_at = full_at - :span")
            connection.execute(earlier, {"span": tokens * HOUR / 3})

    def test_jobs_wait_for_tokens_however_soon_the_others_end(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        jobs = put_some(engine, 4, "api")
        assert admit(engine) == 2
        for claimed in worker.claim(10):
            worker.settle(claimed, Succeeded())
        assert admit(engine) == 0

        self.refill(engine)

        assert admit(engine) == 1
        assert held(engine, "api") == [jobs[2]]
        assert status_of(engine, jobs[3]) is JobStatus.BLOCKED
        assert violations(engine) == []

    def test_an_admission_says_when_the_next_token_comes(self, engine: Engine) -> None:
        put_some(engine, 3, "api")

        admitting = rounds()

        assert run_round(engine, admitting) == 2
        left = admitting.known.seconds_left(time.monotonic())
        assert left == pytest.approx(1200, abs=60)

    @pytest.mark.parametrize(
        "outcome",
        [Released(), Retried(None, ERROR), Retried(HOUR, ERROR), Snoozed(timedelta())],
        ids=["released", "retried now", "retried later", "snoozed"],
    )
    def test_a_job_that_starts_again_waits_for_a_token(
        self, engine: Engine, worker: LogicalWorker, outcome: Outcome
    ) -> None:
        [job] = put_some(engine, 1, "api")
        admit(engine)
        worker.run_next(outcome)

        assert worker.claim() == []
        assert status_of(engine, job) is JobStatus.BLOCKED
        assert violations(engine) == []
        put_some(engine, 5, "api")
        assert admit(engine) == 1  # the second token

    def test_a_job_of_a_dead_worker_waits_for_a_token(self, engine: Engine) -> None:
        [job] = put_some(engine, 1, "api")
        with workers_at(engine, 2) as [dead, worker]:
            admit(engine)
            assert len(dead.claim()) == 1
            declare_dead(engine, dead)
            assert rescue(engine) == {job: None}
            assert worker.claim() == []
            assert admit(engine) == 1
            [claimed] = worker.claim()

        assert (claimed.job_id, claimed.attempt, claimed.crashes) == (job, 2, 1)

    def test_jobs_that_busy_workers_have_not_started_are_no_more_than_the_burst(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        put_some(engine, 9, "api")
        assert admit(engine) == 2
        self.refill(engine, tokens=3)
        assert admit(engine) == 0

        worker.claim(1)

        assert admit(engine) == 1

    def test_a_job_under_a_strict_limit_too_keeps_its_turn(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        first, second = put_some(engine, 2, "api\nstrict")
        admit(engine)
        worker.run_next(Retried(HOUR, ERROR))

        assert admit(engine) == 0
        assert held(engine, "strict") == [first]
        assert status_of(engine, second) is JobStatus.BLOCKED

    def test_a_rate_that_is_set_holds_from_the_next_admission_on(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        put_some(engine, 9, "api")
        admit(engine)
        worker.claim(9)
        committed(engine, PgQueue().set_limit, "api", 3600)
        admitting = rounds()
        run_round(engine, admitting)
        left = admitting.known.seconds_left(time.monotonic())
        assert left == pytest.approx(1, abs=1)

    def test_a_bucket_whose_time_is_far_ahead_gets_its_tokens_from_now_on(
        self, engine: Engine
    ) -> None:
        """The clock of the server was once wrong."""
        put_some(engine, 1, "api")
        admit(engine)
        far = "UPDATE pgqueue.limit_buckets SET full_at = full_at + interval '300 years'"
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM pgqueue.message_queue"))
            connection.execute(text(far))
        put_some(engine, 1, "api")
        assert admit(engine) == 0

        self.refill(engine)

        assert admit(engine) == 1

    def test_buckets_that_are_full_are_swept_and_others_are_not(self, engine: Engine) -> None:
        put_some(engine, 1, "api")
        put_some(engine, 1, "api [7]")
        put_some(engine, 1, "task 1")
        assert admit(engine) == 3
        keys = text("SELECT limit_key FROM pgqueue.limit_buckets ORDER BY limit_key")
        with engine.begin() as connection:
            full = "UPDATE pgqueue.limit_buckets SET full_at = now() WHERE limit_key = 'api'"
            assert connection.scalars(keys).all() == ["api", "api [7]"]
            connection.execute(text(full))

        with engine.begin() as connection:
            rounds().sweep(connection)
            assert connection.scalars(keys).all() == ["api [7]"]

    def test_an_enqueue_does_not_wait_for_a_bucket(self, engine: Engine) -> None:
        put_some(engine, 3, "api")
        admit(engine)
        hasty = worker_settings(engine.url, lock_timeout="1ms")
        with engine.begin() as connection:
            connection.execute(text("LOCK pgqueue.limit_buckets, pgqueue.limits"))
            assert len(put_some(hasty, 3, "api")) == 3


MANY_KEYS = """
    WITH job AS (
        INSERT INTO pgqueue.jobs (task, limit_keys, run_at)
        SELECT 'tests.task', concat('fair ', key), now() - key * interval '1 ms'
        FROM generate_series(1, :keys) AS key, generate_series(1, :each) AS number
        RETURNING id, queue, priority, run_at, task, limit_keys
    )
    INSERT INTO pgqueue.waiting_messages (limit_keys, queue, priority, run_at, target_id, task)
    SELECT limit_keys, queue, priority, run_at, id, task FROM job
"""
STARTED = """
    WITH gone AS (DELETE FROM pgqueue.message_queue RETURNING target_id, run_at, id)
    SELECT limit_keys FROM gone JOIN pgqueue.jobs ON jobs.id = target_id
    ORDER BY gone.run_at, gone.id
"""
ALL_BUT_ONE_PAUSED = """
    INSERT INTO pgqueue.limits (name, declared, capacity, is_fair)
    SELECT limit_keys, 1000000, 0, true FROM pgqueue.waiting_messages WHERE limit_keys <> 'fair 1'
"""


class TestTurns:
    """Two jobs are ready at once."""

    def started(self, engine: Engine, worker: LogicalWorker) -> list[int]:
        """Admit, and run what is ready; the ids of the jobs."""
        admit(engine)
        jobs = worker.claim(9)
        for claimed in jobs:
            worker.settle(claimed, Succeeded())
        return sorted(claimed.job_id for claimed in jobs)

    def test_keys_take_turns_whatever_was_enqueued_first(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        first = put_some(engine, 5, "fair 1")
        second = put_some(engine, 2, "fair 2")

        started = [self.started(engine, worker) for _ in range(4)]

        assert started == [[first[0], second[0]], [first[1], second[1]], first[2:4], first[4:]]

    def test_a_key_that_has_just_had_its_turn_comes_last(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        first = put_some(engine, 3, "fair 1")
        self.started(engine, worker)
        second = put_some(engine, 1, "fair 2")
        third = put_some(engine, 1, "fair 3")

        assert self.started(engine, worker) == [*second, *third]
        assert self.started(engine, worker) == first[2:]

    def test_ready_jobs_of_another_queue_or_priority_keep_none_back(self, engine: Engine) -> None:
        put_some(engine, 3, "fair 1")
        assert admit(engine) == 2
        put_some(engine, 1, "fair 1", queue="other")
        put_some(engine, 1, "fair 1", priority=1)

        assert admit(engine) == 2

    def test_a_retry_waits_for_its_turn_outside_of_its_limit(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        put_some(engine, 4, "fair 1")
        admit(engine)
        for claimed in worker.claim(2):
            worker.settle(claimed, Retried(HOUR, ERROR))

        assert admit(engine) == 2
        assert violations(engine) == []

    def test_jobs_that_are_ready_count_though_none_of_their_key_waits(self, engine: Engine) -> None:
        """A key that comes later would have to wait for all of them."""
        for key in range(9):
            put_some(engine, 1, f"fair {key}")
        assert admit(engine) == 2

        assert admit(engine) == 0

    def test_each_of_many_keys_has_its_first_turn_before_any_has_a_second(
        self, engine: Engine
    ) -> None:
        """More keys than a step reads; the key with the largest number has waited longest."""
        count = 1100
        with engine.begin() as connection:
            connection.execute(text(MANY_KEYS), {"keys": count, "each": 2})
        admitting_rounds, turns = rounds(), list[int]()

        while len(turns) < count:
            run_round(engine, admitting_rounds)
            with engine.begin() as connection:
                turns += connection.scalars(text(STARTED)).all()

        assert {f"fair {key}" for key in range(1000, 1101)} <= set(turns[:112])
        assert len(set(turns[:count])) == count

    def test_a_key_that_was_paused_keeps_no_other_of_many_back(self, engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text(MANY_KEYS), {"keys": 1100, "each": 1})
            connection.execute(text(ALL_BUT_ONE_PAUSED))

        assert admit(engine) == 1


class TestKeys:
    """A key with a capacity of its own."""

    def set_key(self, engine: Engine, capacity: int | None, **more: Any) -> str:
        queue = PgQueue()

        @queue.task(name="transfer", limit=Limit(2, by="account", name="giro"))
        def transfer(account: int) -> None: ...

        with engine.begin() as connection:
            return queue.set_limit(connection, "giro", capacity, **{"key": 7, **more})

    def test_a_capacity_of_a_key_holds_for_no_other_until_it_is_reset(self, engine: Engine) -> None:
        assert self.set_key(engine, 0) == "giro [7]"
        put_some(engine, 3, "giro [7]")
        put_some(engine, 3, "giro [8]")
        assert admit(engine) == 2
        assert held(engine, "giro [7]") == []

        self.set_key(engine, None)

        assert admit(engine) == 2
        assert len(held(engine, "giro [7]")) == 2

    @pytest.mark.parametrize(("key", "stored"), [(7, "[7]"), (None, "[null]"), ((1, 2), None)])
    def test_a_key_is_paused_and_resumed(
        self, engine: Engine, key: Any, stored: str | None
    ) -> None:
        queue = PgQueue()
        by = "account" if stored else ("account", "bank")
        queue.task(name="transfer", limit=Limit(2, by=by, name="giro"))(lambda account, bank: None)
        name = f"giro {stored or '[1,2]'}"
        put_some(engine, 1, name)
        put_some(engine, 1, "giro [8]")

        with engine.begin() as connection:
            assert queue.pause_key(connection, "giro", key) == name
        assert admit(engine) == 1
        assert held(engine, name) == []

        with engine.begin() as connection:
            assert queue.resume_key(connection, "giro", key) == name
        assert admit(engine) == 1

    def test_the_capacity_of_a_key_may_be_larger_than_that_of_the_limit(
        self, engine: Engine
    ) -> None:
        self.set_key(engine, 5)
        put_some(engine, 9, "giro [7]")

        assert admit(engine) == 5

    def test_the_capacity_of_a_key_is_listed_beside_its_limit(self, engine: Engine) -> None:
        self.set_key(engine, 1)
        put_some(engine, 3, "giro [7]")
        put_some(engine, 3, "giro [8]")
        admit(engine)
        with engine.connect() as connection:
            found = {
                one.name: (one.capacity, one.held, one.waiting)
                for one in PgQueue().limits(connection)
            }

        assert found == {"giro": (2, 3, 3), "giro [7]": (1, 1, 2)}

    def test_the_capacity_of_a_key_of_a_strict_limit_is_one_whatever_was_set(
        self, engine: Engine
    ) -> None:
        self.set_key(engine, 5)
        strict = Limit(1, by="account", name="giro", order="strict")
        with engine.begin() as connection:
            Limits(connection).declare([strict])
        put_some(engine, 3, "giro [7]")

        assert admit(engine) == 1

    @pytest.mark.parametrize(
        ("key", "words"),
        [((7, 8), "give the value of account"), (object(), "stored form"), ([], "account")],
    )
    def test_a_wrong_key_is_refused(self, engine: Engine, key: Any, words: str) -> None:
        with pytest.raises(OptionError, match=words):
            self.set_key(engine, 1, key=key)


class TestDeclared:
    def test_the_capacity_that_was_set_takes_precedence(self, engine: Engine) -> None:
        with engine.begin() as connection:
            limits = Limits(connection)
            limits.declare([Limit(2, name="task"), Limit(1, name="line", order="strict")])
            assert limits.set_capacity("task", 5)
            limits.declare([Limit(3, name="task")])
            assert limits.rules() == {"task": LimitRule(5), "line": LimitRule(1, is_strict=True)}

            assert limits.set_capacity("task", None)
            assert limits.rules()["task"] == LimitRule(3)
            assert not limits.set_capacity("unknown", 5)


FAR = """
    WITH job AS (
        INSERT INTO pgqueue.jobs (task, limit_keys)
        SELECT 'tests.task', CASE WHEN n <= :of_one THEN 'bank' ELSE concat('task ', n) END
        FROM generate_series(1, :of_one + :keys) AS n
        RETURNING id, queue, priority, run_at, task, limit_keys
    )
    INSERT INTO pgqueue.waiting_messages (limit_keys, queue, priority, run_at, target_id, task)
    SELECT limit_keys, queue, priority, run_at, id, task FROM job
"""


class TestPlans:
    def test_a_blocked_key_with_many_jobs_is_read_like_one_with_few(self, engine: Engine) -> None:
        self._fill(engine, of_one=100_000, keys=10)
        own = prepare_at_once(worker_settings(engine.url, **AUTO_EXPLAIN))
        with own.connect() as connection, plans_of(connection) as plans:
            step = rounds().step(connection)

        assert step.admitted == 11
        for plan in plans.seen:
            assert plan.scans_of("waiting_messages") <= {
                "Index Scan waiting_messages_pkey",
                "Index Only Scan waiting_messages_pkey",
            }
            assert plan.scans_of("jobs") <= {"Index Scan jobs_pkey"}
            assert plan.buffers < 1500

    def test_ten_thousand_keys_are_admitted_in_steps_that_read_no_table(
        self, engine: Engine
    ) -> None:
        self._fill(engine, of_one=0, keys=10_000)
        own = prepare_at_once(worker_settings(engine.url, **AUTO_EXPLAIN))
        keys, admitted = rounds(), 0
        with own.connect() as connection, plans_of(connection) as plans:
            for _ in range(12):
                admitted += keys.step(connection).admitted
                connection.commit()

        assert admitted == 10_000
        for plan in plans.seen:
            assert plan.scans_of("jobs") <= {"Index Scan jobs_pkey"}
            assert plan.scans_of("message_queue") <= {
                "Index Scan message_queue_pkey",
                "Index Only Scan message_queue_pkey",
            }
            assert plan.buffers < 60_000

    @staticmethod
    def _fill(engine: Engine, *, of_one: int, keys: int) -> None:
        """Of which ANALYZE has seen nothing: then the planner knows least."""
        with engine.begin() as connection:
            for table in ("jobs", "waiting_messages", "limit_places", "message_queue"):
                off = f"ALTER TABLE pgqueue.{table} SET (autovacuum_enabled = off)"
                connection.execute(text(off))
            connection.execute(text(FAR), {"of_one": of_one, "keys": keys})


UNUSED: dict[str, Any] = {
    "enqueue": enqueueing.enqueue_job(start=Start.NOW, unique=True, notify=True, labelled=True),
    "enqueue_many": enqueueing.enqueue_jobs(start=Start.NOW, notify=True),
    "enqueue_unique": enqueueing.enqueue_keyed_jobs(start=Start.NOW, notify=True),
    "flush": enqueueing.dispatch_flushed_jobs(unique=True, notify=True),
    "claim": claiming.claim(ahead=True, suspects=True),
    "upcoming": claiming.upcoming(),
    "settle": settling.settle_succeeded(),
    "settle_one": settling.settle_one_success(),
}


@pytest.mark.parametrize("statement", UNUSED.values(), ids=UNUSED)
def test_the_statements_of_jobs_without_limits_name_nothing_of_limits(statement: Any) -> None:
    dialect: Any = postgresql.dialect
    words = str(statement.compile(dialect=dialect()))

    assert "limit_" not in words
    assert "waiting_messages" not in words


EARLIER = """
    WITH message AS (
        UPDATE pgqueue.waiting_messages SET run_at = now() - target_id * interval '1 hour'
        RETURNING target_id, run_at
    )
    UPDATE pgqueue.jobs SET run_at = message.run_at FROM message WHERE id = target_id
"""
"""As if waiting jobs had become due before, the last job first."""


class TestRoundsOfSomeLanes:
    """What an admitter remembers of lanes and places."""

    @pytest.fixture(autouse=True)
    def _session(self, engine: Engine) -> Iterator[None]:
        """The places are remembered as long as the session lasts."""
        with engine.connect() as self.line:
            self.rounds = rounds()
            self.admit()
            yield

    def admit(self, *keys: str, of: AdmissionRounds | None = None) -> int:
        """Run a round of the lanes under these keys, or of all lanes."""
        admitting = of or self.rounds
        if keys:
            admitting.begin_some(keys)
        else:
            admitting.begin()
        admitted = 0
        while True:
            with self.line.begin():
                step = admitting.step(self.line)
            admitted += step.admitted
            if step.is_last:
                return admitted

    def test_they_read_the_known_lanes_that_share_a_key_and_no_others(self, engine: Engine) -> None:
        put_some(engine, 3, "task")
        put_some(engine, 3, "bank\ntask")
        put_some(engine, 3, "strict")
        put_some(engine, 3, "fair a")
        self.admit()

        lanes = {name: self.rounds.known.under([name]) for name in ("task", "bank", "fair a")}

        names = {name: [lane.limit_keys for lane in found] for name, found in lanes.items()}
        assert names == {
            "task": ["bank\ntask", "task"],
            "bank": ["bank\ntask"],
            "fair a": ["fair a"],
        }

    def test_under_a_fair_limit_a_key_without_a_turn_comes_before_the_others(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        put_some(engine, 5, "fair b")
        assert self.admit() == 2
        worker.run_next(Succeeded())
        new = [*put_some(engine, 1, "fair a"), *put_some(engine, 1, "fair c")]
        for key, job in zip(("fair a", "fair c"), new, strict=True):
            assert self.admit("fair b") == 1
            assert held(engine, key) == [job]
            worker.run_next(Succeeded())

    def test_a_notification_lets_them_find_new_keys(self, engine: Engine) -> None:
        put_some(engine, 2, "skip")
        self.admit()
        [before], [behind] = put_some(engine, 1, "bank"), put_some(engine, 1, "task")

        assert self.admit("skip") == 0
        self.rounds.begin_some((), is_notified=True)
        with self.line.begin():
            assert self.rounds.step(self.line).admitted == 2

        assert held(engine, "bank") == [before]
        assert held(engine, "task") == [behind]

    def test_a_notification_lets_them_pass_over_keys_in_which_jobs_wait_for_a_place(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        put_some(engine, 2, "bank")
        put_some(engine, 1, "task")
        self.admit()
        worker.run_next(Succeeded())
        [new] = put_some(engine, 1, "task")

        self.rounds.begin_some((), is_notified=True)
        with self.line.begin():
            assert self.rounds.step(self.line).admitted == 1

        assert new in held(engine, "task")
        assert self.admit("bank") == 1

    def test_a_place_that_was_given_up_is_taken_by_the_next_job(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        jobs = put_some(engine, 5)
        self.admit()
        for job in jobs[:3]:
            assert held(engine) == [job]
            worker.run_next(Succeeded())
            assert self.admit("bank") == 1

    def test_a_place_that_another_worker_has_given_to_an_older_job_is_counted(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        with engine.begin() as late:
            old = put(late, "task")
            first, second, third = put_some(engine, 3, "task")
            assert self.admit() == 2
        worker.run_next(Succeeded())

        assert self.admit(of=rounds()) == 1
        assert self.admit("task") == 0

        assert sorted(held(engine, "task")) == [old, second]
        assert status_of(engine, first) is JobStatus.SUCCEEDED
        assert status_of(engine, third) is JobStatus.BLOCKED

    def test_a_job_that_was_committed_late_is_found_by_a_round_of_all_lanes(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        second, _ = put_some(engine, 2)
        execute(engine, EARLIER)
        self.admit()
        [late] = put_some(engine, 1)
        execute(engine, EARLIER)
        worker.run_next(Succeeded())

        assert self.admit("bank") == 1
        assert held(engine) == [second]
        worker.run_next(Succeeded())
        assert self.admit("bank") == 0
        assert self.admit() == 1
        assert held(engine) == [late]

    def test_a_capacity_that_was_raised_is_used_in_all_lanes(self, engine: Engine) -> None:
        put_some(engine, 3, "bank")
        put_some(engine, 1, "task")
        self.admit()
        assert len(held(engine)) == 1
        with engine.begin() as connection:
            Limits(connection).declare([Limit(3, name="bank")])
        self.rounds._own = {key: rule for key, rule in RULES.items() if key != "bank"}

        assert self.admit("task") == 2

    @pytest.mark.parametrize("key", ["bank", "task", "strict", "fair a", "api"])
    def test_they_read_no_more_while_a_snapshot_is_held(
        self, engine: Engine, worker: LogicalWorker, key: str
    ) -> None:
        with engine.begin() as connection:
            api = Limit(10**6, name="api", per=timedelta(minutes=1), burst=10)
            Limits(connection).declare([api])
        put_some(engine, 80, key)
        telling = prepare_at_once(worker_settings(engine.url, **AUTO_EXPLAIN))
        with engine.connect() as holder, telling.connect() as self.line:
            holder.execution_options(isolation_level="REPEATABLE READ").execute(text("SELECT 1"))
            self.admit()
            pages = []
            for _ in range(40):
                worker.run_next(Succeeded())
                with plans_of(self.line) as plans:
                    assert self.admit(key) == 1
                pages.append(sum(plan.buffers for plan in plans.seen))

        assert max(pages[-5:]) < 1.5 * max(pages[:5])
