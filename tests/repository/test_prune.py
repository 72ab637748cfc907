"""Pruning: which ended jobs it deletes, and what keeps it from deleting others."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from chaos.interleavings.logical_workers import execute, violations
from pgqueue import Keep, PgQueue
from pgqueue.repository.tables import lock_key
from pgqueue.rules.retention import Retention
from pgqueue.worker.duties.prune import MOST, PruneRound, RoundState

PRUNE_LOCK = lock_key("prune")
MONTH = timedelta(days=30)
RETENTION = Retention(
    default=Keep(),
    queues={"audit": Keep(None, None, None), "mail": Keep(succeeded=timedelta(days=60))},
    tasks={"known": None, "short": Keep(succeeded=timedelta(days=1))},
)

JOBS = """
    INSERT INTO pgqueue.jobs (task, queue, outcome, finished_at, created_at, attempts)
    SELECT :task, :queue, :outcome, ended, coalesce(ended, clock_timestamp() - :age), 1
    FROM (SELECT CASE WHEN :outcome <> '' THEN clock_timestamp() - :age END AS ended) AS moment,
         generate_series(1, :number)
    RETURNING id
"""
LETTERS = """
    INSERT INTO pgqueue.dead_letters (job_id, outcome, queue, task, finished_at)
    SELECT id, outcome, queue, task, finished_at FROM pgqueue.jobs
    WHERE outcome IN ('failed', 'cancelled') ON CONFLICT DO NOTHING
"""


@pytest.fixture
def pruner(database_url: str) -> Iterator[Connection]:
    """The connection of a worker that prunes, which waits for no lock."""
    engine = create_engine(database_url, connect_args={"options": "-c lock_timeout=100ms"})
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def ended(
    engine: Engine,
    *,
    age: timedelta = MONTH,
    task: str = "known",
    queue: str = "default",
    outcome: str = "succeeded",
    number: int = 1,
) -> list[int]:
    """Insert jobs that were created and ended some time ago."""
    with engine.begin() as connection:
        words = {"task": task, "queue": queue, "outcome": outcome, "age": age, "number": number}
        ids = connection.execute(text(JOBS), words).scalars().all()
        connection.execute(text(LETTERS))
    return list(ids)


def prune(connection: Connection, retention: Retention = RETENTION) -> PruneRound:
    prune_round = PruneRound(retention)
    while (progress := prune_round.step(connection)) is RoundState.MORE:
        pass
    assert progress is RoundState.DONE
    return prune_round


def left(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT id FROM pgqueue.jobs ORDER BY id")))


def rows(engine: Engine, name: str) -> int:
    with engine.connect() as connection:
        found: int = connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one()
    return found


class TestRules:
    def test_the_rule_of_a_task_to_keep_jobs_comes_before_that_of_the_queue(
        self, engine: Engine, pruner: Connection
    ) -> None:
        rules: list[tuple[dict[str, Any], bool]] = [
            ({}, False),
            ({"age": timedelta(days=13)}, True),
            ({"outcome": "cancelled"}, False),
            ({"outcome": "failed"}, True),
            ({"outcome": "failed", "age": timedelta(days=91)}, False),
            ({"queue": "mail"}, True),
            ({"queue": "mail", "age": timedelta(days=61)}, False),
            ({"queue": "audit", "age": timedelta(days=8000)}, True),
            ({"task": "short", "queue": "audit", "age": timedelta(days=2)}, False),
            ({"task": "unknown", "age": timedelta(days=8000)}, True),
        ]
        jobs = [(ended(engine, **job), is_kept) for job, is_kept in rules]

        prune(pruner)

        assert left(engine) == [id for ids, is_kept in jobs for id in ids if is_kept]

    def test_a_prune_reads_nothing_if_everything_is_kept(
        self, engine: Engine, pruner: Connection
    ) -> None:
        ids = ended(engine)
        for_ever = Retention(Keep(None, None, None), {}, {"known": None})

        assert prune(pruner, for_ever).deleted == 0
        assert left(engine) == ids

    def test_a_dead_job_of_a_short_rule_is_found_among_young_jobs(
        self, engine: Engine, pruner: Connection
    ) -> None:
        young = ended(engine, age=timedelta(0), number=2 * MOST)
        ended(engine, task="brief", outcome="cancelled", age=timedelta(0))
        brief = Keep(timedelta(0), timedelta(0), failed=None)

        rules = Retention(Keep(), {}, {"known": None, "brief": brief})
        assert prune(pruner, rules).deleted == 1
        assert left(engine) == young

    def test_an_unfinished_job_is_never_deleted(self, engine: Engine, pruner: Connection) -> None:
        queue = PgQueue(engine)
        queue.task(name="known")(lambda: None)
        job = queue.tasks["known"].delay()
        execute(engine, "UPDATE pgqueue.jobs SET created_at = '2000-01-01'")

        prune(pruner)

        assert left(engine) == [job.id]


class TestARound:
    def test_a_round_deletes_the_records_of_a_job_too_and_leaves_those_of_others(
        self, engine: Engine, pruner: Connection
    ) -> None:
        ended(engine, outcome="failed", age=timedelta(days=100), number=3)
        [kept] = ended(engine, outcome="failed")
        with engine.begin() as connection:
            for table, columns, values in (
                ("job_attempts", "message_id, attempt, outcome", "1, 1, 'failed'"),
                ("unreadable_jobs", "task, reason", "'known', 'older code'"),
            ):
                connection.execute(
                    text(
                        f"INSERT INTO pgqueue.{table} (job_id, {columns}) "
                        f"SELECT id, {values} FROM pgqueue.jobs"
                    )
                )

        assert prune(pruner).deleted == 3

        assert left(engine) == [kept]
        for table in ("job_attempts", "dead_letters", "unreadable_jobs"):
            assert rows(engine, f"pgqueue.{table}") == 1
        assert violations(engine) == []

    def test_a_round_passes_jobs_that_are_kept_and_ends_at_the_young_ones(
        self, engine: Engine, pruner: Connection
    ) -> None:
        ended(engine, task="unknown", number=2 * MOST)
        ended(engine, number=2 * MOST)
        ended(engine, age=timedelta(0), number=MOST)

        assert prune(pruner).deleted == 2 * MOST
        assert rows(engine, "pgqueue.jobs") == 3 * MOST

    def test_two_rounds_do_not_prune_at_once(self, engine: Engine, pruner: Connection) -> None:
        ended(engine)
        with engine.begin() as other:
            other.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": PRUNE_LOCK})

            assert PruneRound(RETENTION).step(pruner) is RoundState.BUSY

        assert prune(pruner).deleted == 1

    def test_a_job_with_a_lease_stays_until_its_worker_has_given_it_up(
        self, engine: Engine, pruner: Connection
    ) -> None:
        [job_id] = ended(engine, outcome="cancelled")
        lease = "INSERT INTO pgqueue.leases (target_id, message_id, attempt, worker_id) "
        execute(engine, lease + "VALUES (:id, 1, 1, gen_random_uuid())", id=job_id)
        prune(pruner)
        assert left(engine) == [job_id]

        execute(engine, "DELETE FROM pgqueue.leases")
        prune(pruner)
        assert left(engine) == []

    def test_a_job_that_is_being_requeued_is_skipped(
        self, engine: Engine, pruner: Connection
    ) -> None:
        [job_id] = ended(engine, outcome="cancelled")
        with engine.begin() as operator:
            assert PgQueue().requeue(operator, job_id)

            assert prune(pruner).deleted == 0

        assert prune(pruner).deleted == 0
        assert violations(engine) == []


class TestRowsOfTheApplication:
    """Each foreign key decides what becomes of the rows that refer to a job."""

    @pytest.mark.parametrize(
        ("on_delete", "reports", "jobs"),
        [("CASCADE", 0, 0), ("SET NULL", 1, 0), ("RESTRICT", 1, 1), ("NO ACTION", 1, 1)],
    )
    def test_the_foreign_key_of_the_application_decides_what_is_pruned(
        self, engine: Engine, pruner: Connection, on_delete: str, reports: int, jobs: int
    ) -> None:
        refer(engine, ended(engine), f"ON DELETE {on_delete}")
        ended(engine)

        assert prune(pruner).kept == []

        assert rows(engine, "reports") == reports
        assert len(left(engine)) == jobs

    @pytest.mark.parametrize("deferred", ["", "DEFERRABLE INITIALLY DEFERRED"])
    def test_a_job_that_cannot_be_pruned_stops_no_other(
        self, engine: Engine, pruner: Connection, deferred: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The rows that refuse it refer to rows that go with the job: nothing shows it before."""
        refused = ended(engine, number=30)[7::11]
        execute(engine, "CREATE TABLE pages (report int)")
        refer(engine, refused, "ON DELETE CASCADE")
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO pages SELECT id FROM reports"))
            connection.execute(
                text(f"ALTER TABLE pages ADD FOREIGN KEY (report) REFERENCES reports {deferred}")
            )

        prune_round = prune(pruner)
        prune_round.log()

        assert left(engine) == prune_round.kept == refused
        assert prune_round.deleted == 27
        assert f"3 jobs stay although their time is over, job {refused[0]} first" in caplog.text

    def test_a_job_whose_deletion_a_trigger_refuses_stops_no_other(
        self, engine: Engine, pruner: Connection
    ) -> None:
        ids = ended(engine, number=9)
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
                " $$ BEGIN RAISE EXCEPTION 'kept for the auditor'; END $$;"
                "CREATE TRIGGER refuse BEFORE DELETE ON pgqueue.jobs FOR EACH ROW"
                f" WHEN (OLD.id = {ids[3]}) EXECUTE FUNCTION refuse()"
            )

        assert prune(pruner).kept == ids[3:4]

        assert left(engine) == ids[3:4]

    def test_a_row_that_is_locked_holds_up_its_job_only(
        self, engine: Engine, pruner: Connection
    ) -> None:
        ids = ended(engine, number=9)
        refer(engine, ids[3:4], "ON DELETE CASCADE")
        with engine.begin() as editor:
            editor.execute(text("SELECT * FROM reports FOR UPDATE"))

            assert prune(pruner).kept == ids[3:4]

        assert left(engine) == ids[3:4]

    def test_a_round_ends_if_a_table_is_locked(self, engine: Engine, pruner: Connection) -> None:
        ids = ended(engine, number=9)
        refer(engine, ids[3:4], "ON DELETE CASCADE")
        with engine.begin() as migration:
            migration.execute(text("LOCK TABLE reports"))

            assert prune(pruner).deleted == 0

        assert prune(pruner).deleted == 9


def refer(engine: Engine, ids: list[int], on_delete: str) -> None:
    execute(
        engine,
        "CREATE TABLE reports (id serial PRIMARY KEY, "
        f"job_id bigint REFERENCES pgqueue.jobs {on_delete})",
    )
    execute(engine, "INSERT INTO reports (job_id) SELECT unnest(CAST(:ids AS bigint[]))", ids=ids)


def test_minutes_and_errors_whose_time_is_over_are_deleted(
    engine: Engine, pruner: Connection
) -> None:
    execute(
        engine,
        "INSERT INTO pgqueue.task_minutes (at, task) SELECT clock_timestamp() - age, 't'"
        " FROM (VALUES (interval '6 days'), (interval '8 days')) AS minute (age)",
    )
    execute(
        engine,
        "INSERT INTO pgqueue.error_groups (fingerprint, task, error_type, place, first_at, last_at,"
        " job_id, message) SELECT n, 't', '', '', at, at, 1, '' FROM generate_series(80, 100, 20)"
        " AS n, LATERAL (SELECT clock_timestamp() - n * interval '1 day' AS at) AS moment",
    )

    prune(pruner)

    assert rows(engine, "pgqueue.task_minutes") == 1
    assert rows(engine, "pgqueue.error_groups") == 1
