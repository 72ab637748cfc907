"""The commands on the tables: ``upgrade``, ``revision``, ``grant``, ``revoke`` and ``prune``."""

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from shop_rig import assert_one_line, command, pgqueue
from sqlalchemy import Engine, make_url, text

from pgqueue import PgQueue, Retry, Worker
from pgqueue.repository.listing import NOT_YOURS
from pgqueue.schema import SCHEMA_VERSION

ROOT = Path(__file__).parents[2]
OLD = """
    INSERT INTO pgqueue.jobs (task, outcome, created_at, finished_at, attempts)
    SELECT task, 'succeeded', '2020-01-01', '2020-01-01', 1
    FROM unnest(ARRAY['add', 'add', 'lost.task']) AS task
"""


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)
    queue.task(name="add")(lambda a: None)
    return queue


class TestUpgrade:
    def test_upgrade_creates_the_tables_and_may_be_repeated(self, empty_engine: Engine) -> None:
        queue = PgQueue(empty_engine)

        ended = [command(queue, name) for name in ("upgrade", "upgrade", "status")]

        assert [one.returncode for one in ended] == [0, 0, 0]
        assert f"version {SCHEMA_VERSION}" in ended[0].stdout

    @pytest.mark.parametrize("words", ["status", "jobs 1", "requeue 1", "prune", "grant"])
    def test_missing_tables_ask_for_an_upgrade(self, empty_engine: Engine, words: str) -> None:
        ended = command(PgQueue(empty_engine), *words.split())

        assert_one_line(ended, "upgrade`")
        assert ended.returncode == 1


class TestRevision:
    def test_a_revision_is_written_into_the_history_of_the_host(self, tmp_path: Path) -> None:
        alembic = [sys.executable, "-m", "alembic", "init", "migrations"]
        subprocess.run(alembic, cwd=tmp_path, check=True, capture_output=True)

        ended = command(PgQueue(), "revision", str(tmp_path / "migrations"), "-m", "bring the jobs")

        written = next((tmp_path / "migrations" / "versions").glob("*bring_the_jobs.py"))
        assert ended.returncode == 0
        assert f"pgqueue.schema.upgrade(to={SCHEMA_VERSION}" in written.read_text()

    @pytest.mark.parametrize("ini", ["with the logging alone", "none"])
    def test_a_revision_is_written_where_pyproject_configures_alembic(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ini: str
    ) -> None:
        alembic = [sys.executable, "-m", "alembic", "init", "-t", "pyproject", "history"]
        subprocess.run(alembic, cwd=tmp_path, check=True, capture_output=True)
        if ini == "none":
            (tmp_path / "alembic.ini").unlink()
        monkeypatch.chdir(tmp_path)

        ended = command(PgQueue(), "revision")

        [written] = (tmp_path / "history" / "versions").glob("*.py")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert f"pgqueue.schema.upgrade(to={SCHEMA_VERSION}" in written.read_text()

    def test_a_pyproject_without_alembic_is_no_history(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "pyproject.toml").write_text("[tool.ruff]\n")
        monkeypatch.chdir(tmp_path)

        assert_one_line(command(PgQueue(), "revision"), "[tool.alembic]")

    def test_a_revision_needs_a_history(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)

        assert_one_line(command(PgQueue(), "revision"), "alembic.ini")

    def test_a_revision_is_never_written_into_the_history_of_pgqueue_itself(self) -> None:
        versions = ROOT / "alembic" / "versions"
        before = sorted(versions.glob("*.py"))

        assert_one_line(pgqueue(ROOT, "revision"), "pgqueue's own history")
        assert sorted(versions.glob("*.py")) == before


class TestRights:
    @pytest.fixture
    def role(self, engine: Engine) -> Iterator[str]:
        name = f"Ops {uuid.uuid4().hex[:8]}"
        with engine.begin() as connection:
            connection.execute(text(f"CREATE ROLE \"{name}\" LOGIN PASSWORD 'x'"))
        yield name
        with engine.begin() as connection:
            connection.execute(text(f'DROP OWNED BY "{name}"'))
            connection.execute(text(f'DROP ROLE "{name}"'))

    @pytest.fixture
    def of_role(self, role: str, database_url: str) -> Iterator[PgQueue]:
        """A queue without tasks on the connections of the role."""
        url = make_url(database_url).set(username=role, password="x")
        queue = PgQueue(url.render_as_string(hide_password=False))
        yield queue
        queue.engine.dispose()

    def test_a_dashboard_sees_and_changes_all_but_payloads(
        self, queue: PgQueue, role: str, of_role: PgQueue
    ) -> None:
        @queue.task(name="charge", retry=Retry.never())
        def charge(card: str) -> None:
            raise ValueError("declined")

        charge.delay("4111")
        Worker(queue).run_until_empty(timeout=60)
        queue.tasks["add"].delay(1)
        granted = command(queue, "grant", "--dashboard", role)
        assert (granted.returncode, granted.stdout) == (0, "Granted.\n")

        shown = command(of_role, "jobs", "1", "--json")
        doctor = command(of_role, "doctor")
        cancelled = command(of_role, "cancel", "--status", "pending", "--yes")

        for words in ("status", "jobs", "workers", "schedules", "limits", "batches", "requeue 1"):
            assert command(of_role, *words.split()).returncode == 0
        assert cancelled.stdout == "1 cancelled\n"
        assert "no row breaks one" in doctor.stdout
        job = json.loads(shown.stdout)
        assert (job["args"], job["result"]) == (NOT_YOURS, NOT_YOURS)
        assert job["last_error"] == "declined"
        assert [attempt["traceback"] for attempt in job["failed_attempts"]] == [NOT_YOURS]

    def test_what_was_granted_is_revoked(self, queue: PgQueue, role: str, of_role: PgQueue) -> None:
        command(queue, "grant", "--dashboard", role)

        revoked = command(queue, "revoke", "--dashboard", role)

        assert (revoked.returncode, revoked.stdout) == (0, "Revoked.\n")
        assert_one_line(command(of_role, "jobs"), "permission denied")

    def test_printed_statements_grant_the_same_rights(
        self, engine: Engine, role: str, of_role: PgQueue
    ) -> None:
        printed = command(PgQueue(), "grant", "--worker", role, "--sql").stdout

        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql(printed)

        Worker(of_role, ["default"]).run_until_empty(timeout=60)

    def test_a_role_that_does_not_exist_is_named(self, queue: PgQueue) -> None:
        ended = command(queue, "grant", "--worker", "nobody_here")

        assert_one_line(ended, 'role "nobody_here" does not exist')


class TestPrune:
    def test_a_dry_run_of_prune_counts_what_the_next_run_deletes(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        with engine.begin() as connection:
            connection.execute(text(OLD))

        def prune(*options: str) -> str:
            return command(queue, "prune", *options).stdout

        assert json.loads(prune("--dry-run", "--json")) == {
            "due": 2,
            "jobs": [{"task": "add", "outcome": "succeeded", "jobs": 2}],
        }
        assert prune("--dry-run").split()[-3:] == ["add", "succeeded", "2"]
        assert prune() == "Deleted 2 jobs.\n"
        assert prune("--dry-run") == "No job to delete.\n"
        assert json.loads(prune("--json")) == {"deleted": 0, "refused": []}

    def test_a_job_that_prune_leaves_is_named(self, queue: PgQueue, engine: Engine) -> None:
        key = "bigint PRIMARY KEY REFERENCES pgqueue.jobs ON DELETE CASCADE"
        with engine.begin() as connection:
            connection.execute(text(OLD))
            connection.execute(text(f"CREATE TABLE a (job {key})"))
            connection.execute(text("CREATE TABLE b (job bigint REFERENCES a)"))
            for table in "ab":
                connection.execute(text(f"INSERT INTO {table} SELECT min(id) FROM pgqueue.jobs"))

        ended = command(queue, "prune")

        assert (ended.returncode, ended.stdout) == (0, "Deleted 1 jobs.\n")
        assert "1 jobs stay although their time is over, job 1 first" in ended.stderr
