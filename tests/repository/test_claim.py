"""The claim: never more than asked, never twice, never blocked, never failed by a strange row."""

import time
import uuid
from collections import Counter
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from chaos.interleavings.logical_workers import (
    PATIENCE,
    TASKS,
    LogicalWorker,
    declare_dead,
    enqueue,
    enqueue_many,
    execute,
    logical_workers,
    pairs,
    rescue,
    run_together,
    stored,
    violations,
    worker_settings,
    workers_at,
)
from pgqueue.models import Lease, MessageQueue
from pgqueue.outcomes import Released
from pgqueue.repository.claim import ClaimCursor, Upcoming
from pgqueue.repository.workers import Workers

BAD_PLANS = [
    {"plan_cache_mode": "force_generic_plan"},
    {"enable_hashjoin": "off", "enable_mergejoin": "off", "enable_material": "off"},
    {"enable_nestloop": "off", "enable_seqscan": "on", "enable_sort": "on"},
    {"enable_indexscan": "off", "enable_indexonlyscan": "off", "enable_bitmapscan": "on"},
    {"enable_tidscan": "off", "enable_material": "off", "enable_hashagg": "off"},
]


class TestSkipLocked:
    def test_a_second_claimer_is_not_blocked_and_takes_others(self, engine: Engine) -> None:
        ids = enqueue_many(engine, 6)
        with workers_at(engine, 2) as [slow, fast]:
            claimed = slow.claim_in_transaction(2)

            others = fast.claim(6)

            assert [row.job_id for row in claimed] == ids[:2]
            assert [row.job_id for row in others] == ids[2:]

    def test_looking_for_the_next_time_waits_for_nobody(self, engine: Engine) -> None:
        with workers_at(engine, 2) as [holder, other]:
            enqueue(engine)
            assert holder.claim_in_transaction()

            upcoming = other.attempts.upcoming(pairs(), tasks=TASKS)

            assert upcoming == Upcoming(is_due=True, seconds=None)

    def test_what_is_due_does_not_hide_what_comes_next(self, engine: Engine) -> None:
        enqueue(engine)
        enqueue(engine, delay=timedelta(seconds=100))
        with workers_at(engine, 1) as [worker]:
            is_due, seconds = worker.attempts.upcoming(pairs(), tasks=TASKS)

            assert is_due
            assert seconds is not None
            assert 0 < seconds <= 100


class TestAges:
    def test_each_queue_and_priority_is_as_old_as_the_first_job_that_may_be_claimed(
        self, engine: Engine
    ) -> None:
        with engine.begin() as connection:
            first, *_ = enqueue_many(connection, 3, priority=3)
            enqueue(connection, priority=4, delay=timedelta(seconds=100))
            enqueue_many(connection, 1, priority=5, queue="other")
            enqueue_many(connection, 1, priority=6, task="tests.unknown")
        with workers_at(engine, 1) as [worker]:
            asked = pairs()

            ages = worker.attempts.ages(asked, tasks=TASKS, age_after=timedelta(minutes=1))

            run_at = worker.line.scalar(
                text("SELECT run_at::text FROM pgqueue.message_queue WHERE target_id = :id"),
                {"id": first},
            )
            assert ages.oldest == {("default", 3): run_at}
            assert len(ages.periods_ago) == 9
            assert sorted(ages.periods_ago, reverse=True) == list(ages.periods_ago)
            assert max(ages.periods_ago) < run_at

    def test_no_claim_skips_the_jobs_that_are_looked_at(self, engine: Engine) -> None:
        enqueue_many(engine, 2)
        with workers_at(engine, 2) as [looking, claiming]:
            attempts = looking.attempts_in_transaction
            attempts.ages(pairs(), tasks=TASKS, age_after=timedelta(seconds=1))

            assert len(claiming.look(5).rows) == 2


class TestTheLimit:
    @pytest.mark.parametrize("plan", BAD_PLANS, ids=lambda plan: next(iter(plan)))
    @pytest.mark.parametrize("ahead", [False, True])
    def test_a_claim_never_takes_more_whatever_the_plan(
        self, engine: Engine, plan: dict[str, str], ahead: bool
    ) -> None:
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE pgqueue.message_queue SET (autovacuum_enabled=0)"))
            for priority in (0, 5, 9):
                for queue in ("default", "other"):
                    enqueue_many(connection, 100, priority=priority, queue=queue)
        badly = worker_settings(engine.url, **plan)
        both = [*pairs("default"), *pairs("other")]

        with logical_workers(badly, 1) as [worker]:
            claims = [
                worker.attempts.claim(both, tasks=TASKS, limit=limit, ahead=ahead)
                for limit in (7, 1, 110)
            ]

        taken = [claim.taken for claim in claims] + [len(claim.rows) for claim in claims]
        assert taken == [7, 1, 110, 7, 1, 110]
        assert len(stored(engine, MessageQueue)) == 600 - 118
        assert len(stored(engine, Lease)) == 118

    def test_jobs_come_by_priority_and_then_in_the_order_they_were_enqueued(
        self, engine: Engine
    ) -> None:
        expected: list[int] = []
        with engine.begin() as connection:
            late = enqueue_many(connection, 3, priority=7)
            for _ in range(3):
                expected.append(enqueue(connection, priority=2))
            expected += late

        with workers_at(engine, 1) as [worker]:
            assert [row.job_id for row in worker.claim(10)] == expected


class TestAhead:
    def test_a_claim_ahead_leaves_what_must_not_wait_and_looks_no_further_than_its_limit(
        self, engine: Engine
    ) -> None:
        """Else it would read all of those that must not wait, each time, to get behind them."""
        with engine.begin() as connection:
            first = enqueue(connection, priority=1)
            alone = enqueue_many(connection, 3, priority=2, max_attempts=1)
            second = enqueue(connection, priority=7)
            last = enqueue(connection, priority=9)
        with workers_at(engine, 1) as [worker]:
            few, more = worker.look(3, ahead=True), worker.look(4, ahead=True)

            assert ([row.job_id for row in few.rows], few.taken, few.left) == ([first], 1, 2)
            assert ([row.job_id for row in more.rows], more.taken, more.left) == ([second], 1, 3)
            rest = worker.look(9)
            assert [row.job_id for row in rest.rows] == [*alone, last]
            assert rest.left == 0


class TestSuspects:
    """Jobs that a worker held when it crashed."""

    @pytest.fixture
    def suspects(self, engine: Engine) -> list[int]:
        ids = enqueue_many(engine, 3)
        with workers_at(engine, 1) as [crashed]:
            crashed.claim(3)
            crashed.crash(engine)
            declare_dead(engine, crashed)
            rescue(engine)
        return ids

    def test_a_claim_takes_one_suspect_with_the_others_that_are_due(
        self, engine: Engine, suspects: list[int]
    ) -> None:
        other = enqueue(engine)
        with workers_at(engine, 1) as [worker]:
            claim = worker.look(9)

        assert [row.job_id for row in claim.rows] == [suspects[0], other]
        assert claim.rows[0].crashes == 1
        assert claim.left == 2

    def test_while_a_suspect_runs_the_others_are_skipped_and_jobs_of_one_attempt_are_not(
        self, engine: Engine, suspects: list[int]
    ) -> None:
        fragile = enqueue(engine, max_attempts=1)
        with workers_at(engine, 1) as [worker]:
            claim = worker.look(2, suspects=False)

        assert [row.job_id for row in claim.rows] == [fragile]
        assert claim.left == 0


class TestTogether:
    def test_of_many_claimers_among_updates_and_enqueuers_each_job_falls_to_one(
        self, engine: Engine
    ) -> None:
        total, first = 5000, 3000
        expected = enqueue_many(engine, first)
        claimed: list[int] = []

        def claim() -> None:
            deadline = time.monotonic() + PATIENCE
            with workers_at(engine, 1) as [worker]:
                while len(claimed) < total and time.monotonic() < deadline:
                    claimed.extend(row.job_id for row in worker.claim(37))

        def enqueue_more() -> None:
            for _ in range((total - first) // 100):
                with engine.begin() as connection:
                    expected.extend(enqueue_many(connection, 100))

        def disturb() -> None:
            execute(engine, MOVE_SOME_MESSAGES)

        run_together(claim, claim, claim, claim, enqueue_more, background=[disturb, disturb])

        assert len(claimed) == len(set(claimed))
        assert set(claimed) == set(expected)
        assert violations(engine) == []


MOVE_SOME_MESSAGES = (
    "UPDATE pgqueue.message_queue SET crashes = crashes WHERE ctid = ANY(ARRAY("
    "SELECT ctid FROM pgqueue.message_queue ORDER BY random() LIMIT 20 FOR UPDATE SKIP LOCKED))"
)
STRANGE_ARGUMENTS = {
    "an array": "'[1, 2]'::jsonb",
    "a number": "'7'::jsonb",
    "an integer of 5,000 digits": """('{"n": ' || repeat('9', 5000) || '}')::jsonb""",
    "3,000 brackets": "(repeat('[', 3000) || repeat(']', 3000))::jsonb",
}


class TestStrangeRows:
    def test_no_strange_row_fails_the_claim_of_the_others(self, engine: Engine) -> None:
        with workers_at(engine, 2) as [dead, worker]:
            good, expected = plant_strange_rows(engine, dead)

            claim = worker.look(100)

            claimed = Counter(row.job_id for row in claim.rows)
            assert claimed == Counter(good | expected)
            assert claim.taken > len(claim.rows)
            assert worker.claim(100) == []
        [untouched] = [lease for lease in stored(engine, Lease) if lease.worker_id == dead.id]
        assert (untouched.message_id, untouched.attempt) == (0, 1)

    @pytest.mark.parametrize("strange", STRANGE_ARGUMENTS)
    def test_arguments_that_cannot_be_read_come_as_text(self, engine: Engine, strange: str) -> None:
        with engine.begin() as connection:
            ids = [enqueue(connection) for _ in range(3)]
            change = f"UPDATE pgqueue.jobs SET args = {STRANGE_ARGUMENTS[strange]} WHERE id = :id"
            connection.execute(text(change), {"id": ids[1]})

        with workers_at(engine, 1) as [worker]:
            claimed = worker.claim(10)

        assert [row.job_id for row in claimed] == ids
        assert [row.args for row in claimed][::2] == ["{}", "{}"]

    def test_a_message_of_an_unknown_task_waits(self, engine: Engine) -> None:
        enqueue(engine, task="tests.of_tomorrow")
        known = enqueue(engine)

        with workers_at(engine, 1) as [worker]:
            assert [row.job_id for row in worker.claim(10)] == [known]

        assert [message.task for message in stored(engine, MessageQueue)] == ["tests.of_tomorrow"]


class TestOtherSettings:
    def test_jobs_come_in_order_whatever_the_server_writes_dates_like(self, engine: Engine) -> None:
        with engine.begin() as connection:
            name = connection.scalar(text("SELECT current_database()"))
            connection.execute(text(f"ALTER DATABASE {name} SET datestyle = 'SQL, DMY'"))
            ids = [enqueue(connection) for _ in range(2)]
            days = ("2024-02-01 00:00:00+00", "2023-12-31 00:00:00+00")
            for id, day in zip(ids, days, strict=True):
                for change in (
                    "UPDATE pgqueue.jobs SET run_at = :day WHERE id = :id",
                    "UPDATE pgqueue.message_queue SET run_at = :day WHERE target_id = :id",
                ):
                    connection.execute(text(change), {"day": day, "id": id})

        with workers_at(engine, 1) as [worker]:
            claim = worker.look(10)

        assert [row.job_id for row in claim.rows] == ids[::-1]
        assert claim.quiet_until < claim.read_at
        assert claim.rows[-1].run_at.startswith("2024-02-01")


class TestTheDead:
    def test_a_worker_that_was_declared_dead_claims_nothing(self, engine: Engine) -> None:
        enqueue(engine)
        with workers_at(engine, 1) as [worker]:
            declare_dead(engine, worker)

            assert worker.claim() == []
            assert Workers(worker.identity).beat(worker.id) is None

    def test_a_worker_that_never_registered_claims_nothing(self, engine: Engine) -> None:
        enqueue(engine)
        with workers_at(engine, 1) as [worker]:
            worker.id = uuid.uuid4()

            assert worker.claim() == []


class TestFrontiers:
    def test_a_claim_looks_behind_its_frontier_only(self, engine: Engine) -> None:
        with engine.begin() as connection:
            ids = [enqueue(connection) for _ in range(4)]
        with workers_at(engine, 1) as [worker]:
            [first] = worker.claim(1)
            [second] = worker.attempts.claim(pairs(), tasks=TASKS, limit=1, ahead=False).rows
            behind = [ClaimCursor("default", 5, second.run_at, second.message_id)]
            worker.settle(first, Released())

            found = worker.attempts.claim(behind, tasks=TASKS, limit=9, ahead=False).rows

            assert [row.job_id for row in found] == ids[2:]
            assert [row.job_id for row in worker.claim(9)] == ids[:1]


def plant_strange_rows(engine: Engine, dead: LogicalWorker) -> tuple[set[int], set[int]]:
    """Every kind of damage there is; the sound jobs, and the damaged ones that can still run."""
    with engine.begin() as connection:
        twice, leased, early, last = (enqueue(connection) for _ in range(4))

        def execute(statement: str, **parameters: object) -> None:
            connection.execute(text(statement), {"worker": dead.id, **parameters})

        message = (
            "INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task) "
            "SELECT queue, priority, run_at, id, task FROM pgqueue.jobs WHERE id = :id"
        )
        execute(message, id=twice)
        execute(
            "INSERT INTO pgqueue.leases (target_id, message_id, attempt, worker_id) "
            "VALUES (:id, 0, 1, :worker)",
            id=leased,
        )
        execute(
            "UPDATE pgqueue.message_queue SET run_at = '2000-01-01Z' WHERE target_id = :id",
            id=early,
        )
        execute(
            "INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task) "
            "VALUES ('default', 5, '2001-01-01', 123456789, 'tests.task')"
        )
        strange = [enqueue(connection) for _ in STRANGE_ARGUMENTS]
        for id, arguments in zip(strange, STRANGE_ARGUMENTS.values(), strict=True):
            execute(f"UPDATE pgqueue.jobs SET args = {arguments} WHERE id = :id", id=id)
        good = {last, enqueue(connection)}
    return good, {twice, early, *strange}
