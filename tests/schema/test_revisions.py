"""Our own revisions: what they create is what the models describe, and they leave nothing."""

import ast
import io
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from catalog import facts, needs_listed_schema, read_facts
from hosts import CHECKOUT
from sqlalchemy import (
    Connection,
    DateTime,
    NullPool,
    create_engine,
    insert,
    select,
    text,
)
from sqlalchemy.exc import IntegrityError

import pgqueue
from pgqueue.models import (
    Base,
    DeadLetter,
    Job,
    Lease,
    MessageQueue,
    SchemaVersion,
)
from pgqueue.models.base import FiniteTime
from pgqueue.schema import upgrade_database

REVISIONS = sorted(Path(pgqueue.__file__).parent.glob("migrations/versions/*.py"))
DOMAINS = runpy.run_path(str(REVISIONS[0]))["DOMAINS"]


def our_history(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", "pgqueue:migrations")
    config.attributes["connection"] = connection
    return config


def test_autogenerate_finds_nothing_to_add(connection: Connection) -> None:
    needs_listed_schema(connection)

    command.check(our_history(connection))


def test_the_catalog_is_the_one_the_models_would_create(
    database_url: str, empty_database_url: str
) -> None:
    engine = create_engine(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA pgqueue"))
        for name, definition in DOMAINS.items():
            connection.execute(text(f"CREATE DOMAIN pgqueue.{name} AS {definition}"))
        Base.metadata.create_all(connection)
    engine.dispose()

    migrated, created = facts(database_url), facts(empty_database_url)

    assert what_models_describe(migrated) == what_models_describe(created)


def what_models_describe(found: set[str]) -> set[str]:
    """Neither views nor storage parameters, which SQLAlchemy 2.0 cannot give to a table."""
    others = ("view ", "column job_overview.", "column invariant_violations", "storage ")
    return {fact for fact in found if not fact.startswith(others)}


def test_the_tables_that_change_often_have_the_storage_they_were_measured_with(
    database_url: str,
) -> None:
    storage = {fact for fact in facts(database_url) if fact.startswith("storage ")}

    assert storage == {
        "storage jobs {fillfactor=45}",
        "storage message_queue {autovacuum_vacuum_scale_factor=0.05}",
        "storage leases {autovacuum_vacuum_scale_factor=0.05}",
        "storage waiting_messages {autovacuum_vacuum_scale_factor=0.05}",
        "storage blocked {autovacuum_vacuum_scale_factor=0.05}",
        "storage limit_places {autovacuum_vacuum_scale_factor=0.05}",
        "storage workers {fillfactor=45}",
        "storage task_minutes {fillfactor=70}",
        "storage queue_minutes {fillfactor=70}",
    }


def test_down_leaves_only_the_schema_and_up_again_gives_the_same(connection: Connection) -> None:
    before = read_facts(connection)

    command.downgrade(our_history(connection), "base")
    between = read_facts(connection)
    command.upgrade(our_history(connection), "head")

    assert between == set()
    assert read_facts(connection) == before


def test_the_history_written_as_sql_gives_the_same(
    empty_database_url: str, database_url: str
) -> None:
    script = io.StringIO()
    config = Config(output_buffer=script)
    config.set_main_option("script_location", "pgqueue:migrations")
    command.upgrade(config, "head", sql=True)
    assert "%" not in script.getvalue()  # env.py of a host may double it

    engine = create_engine(empty_database_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(script.getvalue())
        upgrade_database(engine)
    engine.dispose()

    assert facts(empty_database_url) == facts(database_url)


def test_every_time_in_the_tables_is_finite() -> None:
    times = {
        (column.type.__class__, f"{table.name}.{column.name}")
        for table in Base.metadata.tables.values()
        for column in table.columns
        if isinstance(column.type, DateTime)
    }

    assert {name for kind, name in times if kind is not FiniteTime} == set()


@pytest.mark.parametrize(
    ("domain", "first", "last", "refused"),
    [
        ("finite_time", "2000-01-01 00:00:00+00", "9999-12-31 00:00:00+00", ["epoch", "infinity"]),
        ("priority", "0", "9", ["-1", "10"]),
        ("attempts", "0", "31000", ["-1", "31001"]),
        ("max_attempts", "1", "30000", ["0", "30001"]),
        ("outcome", "failed", "succeeded", ["ended"]),
    ],
)
def test_a_domain_refuses_what_is_out_of_range(
    connection: Connection, domain: str, first: str, last: str, refused: list[str]
) -> None:
    for value in (first, last):
        assert connection.scalar(text(f"SELECT '{value}'::pgqueue.{domain} IS NOT NULL"))

    for value in refused:
        with pytest.raises(IntegrityError, match=domain), connection.begin_nested():
            connection.execute(text(f"SELECT '{value}'::pgqueue.{domain}"))


@pytest.mark.journey
def test_an_author_runs_alembic_in_the_checkout(
    monkeypatch: pytest.MonkeyPatch, empty_database_url: str
) -> None:
    monkeypatch.setenv("PGQUEUE_DATABASE_URL", empty_database_url)

    alembic("upgrade", "head")

    engine = create_engine(empty_database_url, poolclass=NullPool)
    with engine.connect() as connection:
        needs_listed_schema(connection)
    assert "No new upgrade operations detected." in alembic("check")


def alembic(*arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_first_revision_writes_version_one(connection: Connection) -> None:
    command.downgrade(our_history(connection), "base")

    command.upgrade(our_history(connection), "pgqueue_0001")

    row = connection.execute(select(SchemaVersion.version, SchemaVersion.oldest_code)).one()
    assert row == (1, 1)


@pytest.mark.parametrize("revision", REVISIONS, ids=lambda path: path.stem)
def test_a_revision_imports_nothing_that_may_change(revision: Path) -> None:
    imported = {
        f"{node.module}.{name.name}" if isinstance(node, ast.ImportFrom) else name.name
        for node in ast.walk(ast.parse(revision.read_text()))
        if isinstance(node, ast.ImportFrom | ast.Import)
        for name in node.names
    }

    ours = {name for name in imported if name.startswith("pgqueue")}
    assert ours <= {"pgqueue.models.base.SCHEMA"}


def test_the_overview_gives_every_job_the_status_the_model_gives_it(
    connection: Connection,
) -> None:
    put_a_job_in_every_place(connection)

    by_view = connection.execute(text("SELECT id, status FROM pgqueue.job_overview")).all()

    by_model = connection.execute(select(Job.id, Job.status)).all()
    assert sorted(by_view) == sorted(by_model)
    assert {status for _, status in by_view} == {
        "pending",
        "running",
        "blocked",
        "succeeded",
        "failed",
        "cancelled",
    }


def test_the_overview_names_the_worker_of_a_running_job(connection: Connection) -> None:
    put_a_job_in_every_place(connection)

    running = connection.execute(
        text(
            """
            SELECT status, worker_id, lease_started_at IS NOT NULL AS is_started
            FROM pgqueue.job_overview WHERE worker_id IS NOT NULL
            """
        )
    ).one()

    assert (running.status, running.worker_id.int, running.is_started) == ("running", 0, True)


def put_a_job_in_every_place(connection: Connection) -> None:
    """One pending, one running that kept its message, one nowhere, and one of each end."""
    add = insert(Job).returning(Job.id, Job.queue, Job.priority, Job.run_at)
    pending, running, _blocked = (connection.execute(add, {"task": "t"}).one() for _ in range(3))
    for job in (pending, running):
        message = {"queue": job.queue, "priority": job.priority, "run_at": job.run_at}
        connection.execute(insert(MessageQueue), message | {"target_id": job.id, "task": "t"})
    lease = {"message_id": 1, "attempt": 1, "worker_id": "0" * 32}
    connection.execute(insert(Lease), lease | {"target_id": running.id})
    for outcome in ("succeeded", "failed", "cancelled"):
        ended = {"task": "t", "outcome": outcome, "finished_at": text("clock_timestamp()")}
        job = connection.execute(add.values(ended)).one()
        if outcome != "succeeded":
            letter = {"outcome": outcome, "queue": "default", "task": "t"}
            connection.execute(insert(DeadLetter), letter | {"job_id": job.id})
    connection.execute(insert(Lease), lease | {"target_id": job.id})
