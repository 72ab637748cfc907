"""The plans: whatever the planner knows of a large backlog, every row is reached by a key."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import (
    ERROR,
    TASKS,
    LogicalWorker,
    enqueue_many,
    logical_workers,
    pairs,
    worker_settings,
    workers_at,
)
from chaos.plans import AUTO_EXPLAIN, TELLING, Plan, plans_of, prepare_at_once
from pgqueue import PgQueue, Unique
from pgqueue.outcomes import Failed, Outcome, Released, Retried, Snoozed, Succeeded
from pgqueue.repository.claim import Claimed
from pgqueue.repository.health import Health
from pgqueue.repository.listing import Listing
from pgqueue.repository.many import ManyJobs
from pgqueue.repository.progress import ProgressReports
from pgqueue.repository.prune import Pruning
from pgqueue.repository.waits import MOST_AHEAD
from pgqueue.repository.workers import Workers
from pgqueue.rules.retention import Keep, Retention
from pgqueue.testing.databases import fresh_database

BATCH = 100
GENERIC = {"plan_cache_mode": "force_generic_plan"}
"""The plan that knows least: neither the parameters, nor, never analyzed, the tables."""

BACKLOG = """
    WITH job AS (INSERT INTO pgqueue.jobs (task) SELECT 'tests.task' FROM generate_series(1, :jobs)
                 RETURNING id, queue, priority, run_at, task)
    INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task)
    SELECT queue, priority, run_at, id, task FROM job
"""

WAITS = """
    INSERT INTO pgqueue.job_steps (job_id, name, kind, attempt, started_at, signal, key)
    SELECT id, 'wait', 'wait', 1, now(), 'paid', id FROM pgqueue.jobs ORDER BY id LIMIT :waits
"""


@pytest.fixture(scope="module")
def backlog_url(server_url: str, template_url: str) -> Iterator[str]:
    """A backlog that came in one go, and of which ANALYZE has seen nothing."""
    with fresh_database(server_url, template_url=template_url) as url:
        engine = create_engine(url)
        with engine.begin() as connection:
            for table in ("jobs", "message_queue", "leases"):
                connection.execute(
                    text(f"ALTER TABLE pgqueue.{table} SET (autovacuum_enabled = off)")
                )
            connection.execute(text(BACKLOG), {"jobs": 200_000})
        engine.dispose()
        yield url


@pytest.fixture
def worker(backlog_url: str) -> Iterator[LogicalWorker]:
    engine = worker_settings(backlog_url, **GENERIC, **AUTO_EXPLAIN)
    with logical_workers(prepare_at_once(engine), 1) as [worker]:
        yield worker


def test_no_statement_is_compiled(backlog_url: str) -> None:
    """Compiling takes ten times as long as a claim; the dear estimates of its plan ask for it."""
    engine = worker_settings(backlog_url, jit_above_cost="0", **AUTO_EXPLAIN)
    with logical_workers(prepare_at_once(engine), 1) as [worker], plans_of(worker.line) as plans:
        worker.attempts.claim(pairs(), tasks=TASKS, limit=BATCH)

    assert [plan.is_compiled for plan in plans.seen] == [False]


def assert_by_key(plan: Plan, *, buffers: int) -> None:
    assert plan.scans_of("jobs") <= {"Index Scan jobs_pkey", "Index Only Scan jobs_pkey"}
    by_key = {"Index Scan message_queue_pkey", "Index Only Scan message_queue_pkey"}
    assert plan.scans_of("message_queue") <= {*by_key, "Tid Scan"}
    by_job = {"Index Scan leases_pkey", "Index Only Scan leases_pkey"}
    assert plan.scans_of("leases") <= {*by_job, "Tid Scan"}
    assert plan.whole_scans == []
    assert not plan.has_sort
    assert plan.buffers < buffers


class TestClaims:
    @pytest.mark.parametrize(
        "passing", [{}, {"ahead": True}, {"suspects": False}], ids=["none", "ahead", "suspects"]
    )
    def test_a_claim_reads_its_messages_by_their_key_and_deletes_them_by_their_place(
        self, worker: LogicalWorker, passing: dict[str, Any]
    ) -> None:
        with plans_of(worker.line) as plans:
            claims = [worker.look(BATCH, **passing) for _ in range(3)]

        assert [len(claim.rows) for claim in claims] == [BATCH] * 3
        for plan in plans.seen:
            assert_by_key(plan, buffers=40 * BATCH)
            assert plan.scans_of("message_queue") == {"Index Scan message_queue_pkey", "Tid Scan"}

    def test_an_idle_claim_touches_next_to_nothing(self, worker: LogicalWorker) -> None:
        with plans_of(worker.line) as plans:
            worker.attempts.claim(pairs("quiet"), tasks=TASKS, limit=BATCH, ahead=False)

        assert_by_key(plans.only, buffers=100)

    def test_what_is_upcoming_is_looked_up_by_the_key(self, worker: LogicalWorker) -> None:
        with plans_of(worker.line) as plans:
            worker.attempts.upcoming(pairs(), tasks=TASKS)

        assert_by_key(plans.only, buffers=200)

    def test_the_first_due_message_is_looked_up_by_the_key(self, worker: LogicalWorker) -> None:
        with plans_of(worker.line) as plans:
            assert worker.attempts.first_due(pairs(), tasks=TASKS, suspects=True)

        assert_by_key(plans.only, buffers=200)

    def test_ages_are_looked_up_by_the_key(self, worker: LogicalWorker) -> None:
        with plans_of(worker.line) as plans:
            worker.attempts.ages(pairs(), tasks=TASKS, age_after=timedelta(minutes=1))

        assert_by_key(plans.only, buffers=200)

    def test_the_queues_with_jobs_are_found_by_a_probe_for_each(
        self, worker: LogicalWorker
    ) -> None:
        with plans_of(worker.line) as plans:
            assert worker.attempts.queues_with_messages() == ["default"]

        assert plans.only.rows_of("message_queue") <= 2
        assert plans.only.buffers < 50

    def test_counts_of_jobs_look_for_no_lease_of_a_message(self, worker: LogicalWorker) -> None:
        with plans_of(worker.line) as plans:
            Health(worker.line).counts(succeeded=False)

        leases = [one for one in plans.only.nodes if one.get("Relation Name") == "leases"]
        assert [node["Actual Loops"] for node in leases] == [1]


def test_of_all_jobs_only_those_that_wait_for_a_signal_are_read_to_count_them(
    backlog_url: str,
) -> None:
    engine = create_engine(backlog_url, connect_args=TELLING)
    with engine.connect() as connection:
        connection.execute(text(WAITS), {"waits": 20_000})
        connection.execute(text("ANALYZE pgqueue.job_steps"))
        with plans_of(connection) as plans:
            counted = Health(connection).waiting_for_others()
    engine.dispose()

    assert counted == (0, 20_000)
    assert plans.only.scans_of("jobs") == {"Index Scan jobs_pkey"}


OUTCOMES: list[Outcome] = [
    Succeeded({"sum": 3}),
    Retried(timedelta(hours=1), ERROR),
    Failed(ERROR),
    Snoozed(timedelta(hours=1)),
    Released(),
]


class TestSettles:
    @pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
    def test_a_settle_reaches_leases_and_jobs_by_their_keys(
        self, worker: LogicalWorker, outcome: Outcome
    ) -> None:
        claimed = worker.claim(BATCH)
        with plans_of(worker.line) as plans:
            settled = worker.attempts.settle([(one, outcome) for one in claimed])

        assert len(settled) == BATCH
        assert_by_key(plans.only, buffers=80 * BATCH)

    def test_a_settle_of_plain_successes_reaches_leases_and_jobs_by_their_keys(
        self, worker: LogicalWorker
    ) -> None:
        claimed = worker.claim(BATCH)
        with plans_of(worker.line) as plans:
            worker.attempts.settle_succeeded(claimed)

        assert_by_key(plans.only, buffers=60 * BATCH)

    def test_a_settle_of_one_success_reaches_its_lease_and_its_job_by_their_keys(
        self, worker: LogicalWorker
    ) -> None:
        [claimed] = worker.claim()
        with plans_of(worker.line) as plans:
            settled = worker.attempts.settle_one_success(claimed)

        assert list(settled.values()) == ["succeeded"]
        assert_by_key(plans.only, buffers=100)

    def test_jobs_that_nobody_has_locked_are_found_by_their_key(
        self, worker: LogicalWorker
    ) -> None:
        claimed = worker.claim(BATCH)
        mine = text("SELECT id FROM pgqueue.jobs WHERE id = :id FOR UPDATE")
        worker.transaction.execute(mine, {"id": claimed[0].job_id})
        with plans_of(worker.line) as plans:
            free = worker.attempts.free_among(claimed)

        worker.transaction.rollback()
        assert free == {one.job_id for one in claimed[1:]}
        worker.attempts.settle_succeeded(claimed)
        assert_by_key(plans.only, buffers=30 * BATCH)

    def test_progress_reaches_jobs_and_leases_by_their_keys(self, worker: LogicalWorker) -> None:
        claimed = worker.claim(BATCH)
        reports = [
            {
                "job_id": one.job_id,
                "message_id": one.message_id,
                "attempt": one.attempt,
                "worker_id": str(worker.id),
                "progress": {"done": 1, "total": 2, "note": None},
            }
            for one in claimed
        ]
        with plans_of(worker.line) as plans:
            written = ProgressReports(worker.line).write(reports)

        assert written == {one.job_id for one in claimed}
        assert_by_key(plans.only, buffers=60 * BATCH)
        worker.attempts.settle_succeeded(claimed)

    def test_a_rescue_looks_up_jobs_by_their_key(self, worker: LogicalWorker) -> None:
        claimed = worker.claim(BATCH)
        dead = "UPDATE pgqueue.workers SET dead_at = clock_timestamp() WHERE id = %s"
        worker.transaction.exec_driver_sql(dead, (worker.id,))
        with plans_of(worker.transaction) as plans:
            rescued = Workers(worker.transaction).rescue()

        worker.transaction.commit()
        assert {one.job_id for one in rescued} >= {one.job_id for one in claimed}
        for plan in plans.seen:
            assert plan.scans_of("jobs") <= {"Index Scan jobs_pkey", "Index Only Scan jobs_pkey"}


class TestPruning:
    """The walks go up the keys from where they stand; a stretch costs its own jobs only."""

    @pytest.mark.parametrize("dead", [False, True], ids=["all", "dead"])
    def test_a_stretch_of_jobs_is_pruned_by_key(self, worker: LogicalWorker, dead: bool) -> None:
        outcome: Outcome = Failed(ERROR) if dead else Succeeded({"sum": 3})
        claimed = worker.claim(BATCH, suspects=False)
        worker.attempts.settle([(one, outcome) for one in claimed])
        first = min(one.job_id for one in claimed)
        with plans_of(worker.line) as plans:
            stretch = Pruning(worker.line).prune(
                AT_ONCE, (), dead=dead, after=first - 1, size=BATCH
            )

        assert stretch.deleted == BATCH
        assert_by_key_of_records(plans.only, buffers=80 * BATCH)

    def test_a_stretch_without_a_job_to_prune_costs_little(self, worker: LogicalWorker) -> None:
        with plans_of(worker.line) as plans:
            stretch = Pruning(worker.line).prune(AT_ONCE, (), dead=False, after=100_000, size=BATCH)

        assert stretch.deleted == 0
        assert_by_key_of_records(plans.only, buffers=20 * BATCH)

    @pytest.mark.parametrize("dead", [False, True], ids=["all", "dead"])
    def test_the_next_job_to_prune_is_found_by_its_key(
        self, worker: LogicalWorker, dead: bool
    ) -> None:
        with plans_of(worker.line) as plans:
            Pruning(worker.line).next_job(100_000, dead=dead)

        assert plans.only.whole_scans == []
        assert plans.only.buffers < 20


AT_ONCE = Retention(Keep(succeeded=timedelta(0), failed=timedelta(0)), {}, {"tests.task": None})


BACKLOGGED = ("jobs", "message_queue", "waiting_messages")


def test_all_about_one_job_is_read_beside_a_backlog_by_keys(worker: LogicalWorker) -> None:
    """Also how many jobs are before it: at most a thousand are counted."""
    with plans_of(worker.line) as plans:
        job = Listing(worker.line).job(200_000)

    assert (job.status, job.wait.ahead) == ("pending", MOST_AHEAD)
    assert max(plan.rows_of(table) for plan in plans.seen for table in BACKLOGGED) < 2 * MOST_AHEAD


def assert_by_key_of_records(plan: Plan, *, buffers: int) -> None:
    """The records of a deleted job are found by it; the order of a walk is that of an index."""
    assert plan.scans_of("jobs") <= {
        "Index Scan jobs_pkey",
        "Index Only Scan jobs_pkey",
        "Tid Scan",
    }
    # One lease for each running job: read once, if that is less than a probe for each dead job.
    # No job waits to be admitted here: reading an empty table costs less than a probe.
    assert set(plan.whole_scans) <= {"leases", "waiting_messages"}
    assert plan.buffers < buffers


class TestUniqueKeys:
    def test_the_start_of_a_job_that_gives_its_key_back_or_may_expire_reaches_it_by_its_key(
        self, worker: LogicalWorker
    ) -> None:
        claimed = worker.claim(BATCH)[0]

        with plans_of(worker.line) as plans:
            assert worker.attempts.free_key(claimed, in_own_transaction=True)
            assert not worker.attempts.has_expired(claimed, timedelta(hours=1))

        assert len(plans.seen) == 2
        for plan in plans.seen:
            assert_by_key(plan, buffers=100)

    def test_an_enqueue_that_replaces_reaches_jobs_and_messages_by_their_keys(
        self, backlog_url: str
    ) -> None:
        """On a connection of the application, which has no settings of ours."""
        engine = create_engine(backlog_url, connect_args=TELLING)
        queue = PgQueue(engine)

        @queue.task(unique=Unique(until="started", on_conflict="replace"))
        def replaced(n: int) -> None: ...

        rows = [(n,) for n in range(BATCH)]
        with queue.session() as session, session.begin() as transaction:
            replaced.enqueue_many(session, rows)
            with plans_of(session.connection()) as plans:
                replaced.enqueue_many(session, rows)
            transaction.rollback()
        engine.dispose()

        assert len(plans.seen) == 2
        for plan in plans.seen:
            assert not {scan for scan in plan.scans_of("jobs") if "Index" not in scan}
            by_place = {"Index Scan message_queue_pkey", "Tid Scan"}
            assert plan.scans_of("message_queue") <= by_place
            assert plan.buffers < 100 * BATCH

    @pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
    def test_the_holder_of_a_key_across_queues_is_reached_by_it(
        self, backlog_url: str, many: bool
    ) -> None:
        engine = create_engine(backlog_url, connect_args=TELLING)
        queue = PgQueue(engine)

        @queue.task(unique=Unique(across="queues"))
        def alone(n: int) -> None: ...

        rows = [(n,) for n in range(BATCH if many else 1)]
        with queue.session() as session, session.begin() as transaction:
            first = alone.enqueue_many(session, rows)
            with plans_of(session.connection()) as plans:
                assert alone.options(queue="other").enqueue_many(session, rows) == first
            transaction.rollback()
        engine.dispose()

        for plan in plans.seen:
            assert not {scan for scan in plan.scans_of("jobs") if "Index" not in scan}
            assert plan.buffers < 100 * BATCH


class TestHot:
    def test_settling_updates_a_job_in_its_page(self, engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE pgqueue.jobs SET (autovacuum_enabled = off)"))
            enqueue_many(connection, 1000)

        with workers_at(engine, 1) as [worker]:
            settle_in_batches(worker, worker.attempts.settle_succeeded, batch=20)
            worker.line.exec_driver_sql("SELECT pg_stat_force_next_flush()")
            worker.line.exec_driver_sql("SELECT 1")

        with engine.connect() as connection:
            updated, hot = connection.execute(
                text(
                    "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables "
                    "WHERE schemaname = 'pgqueue' AND relname = 'jobs'"
                )
            ).one()
        assert updated == 1000
        assert hot / updated >= 0.9


def settle_in_batches(
    worker: LogicalWorker, settle: Callable[[list[Claimed]], object], *, batch: int = BATCH
) -> None:
    while claimed := worker.claim(batch):
        settle(claimed)


def test_a_requeue_of_many_tests_each_job_once(database_url: str) -> None:
    """Whatever the statistics: these are from before the jobs were cancelled."""
    engine = create_engine(database_url, connect_args=TELLING)
    with Session(engine) as session:
        ids = enqueue_many(session, BATCH)
        session.execute(text("ANALYZE pgqueue.jobs"))
        PgQueue(engine).cancel_where(session, queue="default")

        with plans_of(session.connection()) as plans:
            done = ManyJobs(session).requeue(dict.fromkeys(ids), notify=False)

    assert list(done) == ids
    scans = [node for plan in plans.seen for node in plan.nodes if "Relation Name" in node]
    assert max(node["Actual Loops"] for node in scans) <= BATCH


@pytest.mark.parametrize("unique", [None, Unique()], ids=["no keys", "keys"])
def test_a_flush_of_many_jobs_compares_no_job_with_all_of_them(
    database_url: str, unique: Unique | None
) -> None:
    """A scan of the table would also read the list of their ids anew for each job."""
    engine = create_engine(database_url, connect_args=TELLING)
    queue = PgQueue(engine)

    @queue.task(name="tests.note", unique=unique)
    def note(number: int) -> None: ...

    with Session(engine) as session:
        session.add_all(note.job(number) for number in range(2_000))
        with plans_of(session.connection()) as plans:
            session.flush()

    scans = [node for plan in plans.seen for node in plan.nodes if "Filter" in node]
    assert [node for node in scans if "ANY" in node["Filter"]] == []
