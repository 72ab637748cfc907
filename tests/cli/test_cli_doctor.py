"""What the doctor and the status tell of jobs that nobody runs, and of a server set up badly."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shop_rig import pgqueue, wait_until, write_shop
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.orm import Session

from pgqueue import PgQueue
from pgqueue.embedded import EmbeddedPostgres
from pgqueue.schema import upgrade_database


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path)


@pytest.fixture
def orphan(engine: Engine) -> int:
    """A job of a task that the shop does not know."""
    queue = PgQueue(engine)

    @queue.task(name="shop.removed", queue="attic")
    def removed() -> None: ...

    return removed.delay().id


@pytest.fixture
def database_name(session: Session) -> str:
    return str(session.scalars(text("SELECT current_database()")).one())


def findings(shop: Path, database_url: str, *options: str) -> list[dict[str, Any]]:
    arguments = options or ("--url", database_url)
    ended = pgqueue(shop, *arguments, "doctor", "--json", database_url=database_url)
    assert ended.stderr == ""
    found: list[dict[str, Any]] = json.loads(ended.stdout)["findings"]
    return found


def about(found: list[dict[str, Any]], subject: str) -> tuple[str, str]:
    """Level and detail of the one finding about a subject."""
    [one] = [finding for finding in found if finding["subject"] == subject]
    return one["level"], one["detail"]


class TestJobsThatNobodyRuns:
    def test_are_told_by_task_when_the_app_is_known(
        self, shop: Path, orphan: int, database_url: str
    ) -> None:
        level, detail = about(findings(shop, database_url, "--app", "shop:queue"), "unknown task")

        assert level == "warning"
        assert "no task shop.removed, of which 1 job is due" in detail

    def test_are_told_by_queue_when_no_worker_serves_it(
        self, shop: Path, orphan: int, database_url: str
    ) -> None:
        level, detail = about(findings(shop, database_url), "workers")

        assert level == "warning"
        assert "no living worker serves queue attic" in detail

    def test_are_part_of_the_status(self, shop: Path, orphan: int, database_url: str) -> None:
        app = ("--app", "shop:queue", "status")
        found = json.loads(pgqueue(shop, *app, "--json", database_url=database_url).stdout)
        plain = pgqueue(shop, *app, database_url=database_url)

        assert [one["name"] for one in found["unknown_tasks"]] == ["shop.removed"]
        assert "Warning: this app knows no task shop.removed" in plain.stdout


class TestJobsThatNobodyCanRead:
    @pytest.fixture(autouse=True)
    def unreadable(self, engine: Engine, orphan: int) -> None:
        """One that waits, and one that was read meanwhile and has ended."""
        row = """
            INSERT INTO pgqueue.unreadable_jobs (job_id, task, reason, since)
            VALUES (:job, 'shop.removed', :reason, now() - interval '5 minutes')
        """
        ended = PgQueue(engine).task(name="shop.ended")(_nothing).delay().id
        with engine.begin() as connection:
            connection.execute(text(row), {"job": orphan, "reason": "arguments name 'x'"})
            connection.execute(text(row), {"job": ended, "reason": "arguments name 'y'"})
            done = "UPDATE pgqueue.jobs SET outcome = 'succeeded', finished_at = now()"
            connection.execute(text(f"{done} WHERE id = :id"), {"id": ended})

    def test_are_told_with_the_age_of_the_oldest(self, shop: Path, database_url: str) -> None:
        level, detail = about(findings(shop, database_url), "unreadable jobs")

        assert level == "warning"
        assert "1 job waits (the oldest since 5 minutes)" in detail
        assert "arguments name 'x'; start workers with the code" in detail

    def test_are_part_of_the_status(self, shop: Path, database_url: str) -> None:
        app = ("--app", "shop:queue", "status")
        found = json.loads(pgqueue(shop, *app, "--json", database_url=database_url).stdout)
        plain = pgqueue(shop, *app, database_url=database_url)

        [one] = found["unreadable_jobs"]
        assert (one["task"], one["jobs"]) == ("shop.removed", 1)
        assert one["oldest_age"] >= 300
        assert "Warning: 1 job waits (the oldest since 5 minutes)" in plain.stdout


def _nothing() -> None: ...


class TestServer:
    def test_read_only_is_wrong(
        self, shop: Path, session: Session, database_name: str, database_url: str
    ) -> None:
        read_only = f"ALTER DATABASE {database_name} SET default_transaction_read_only = on"
        session.execute(text(read_only))
        session.commit()

        level, detail = about(findings(shop, database_url), "transaction_read_only")
        assert level == "wrong"
        assert "run ALTER DATABASE ... RESET default_transaction_read_only" in detail

    def test_tables_without_autovacuum_are_named(
        self, shop: Path, session: Session, database_url: str
    ) -> None:
        session.execute(text("ALTER TABLE pgqueue.leases SET (autovacuum_enabled = 'no')"))
        session.commit()

        level, detail = about(findings(shop, database_url), "autovacuum")

        assert level == "warning"
        assert "pgqueue.leases" in detail

    @pytest.fixture
    def careless_role(self, engine: Engine, database_name: str) -> Iterator[str]:
        role = f"careless_{uuid.uuid4().hex[:8]}"
        with engine.begin() as connection:
            connection.execute(text(f"CREATE ROLE {role}"))
            lose = f"ALTER ROLE {role} IN DATABASE {database_name} SET synchronous_commit = off"
            connection.execute(text(lose))
        yield role
        with engine.begin() as connection:
            connection.execute(text(f"DROP ROLE {role}"))

    def test_a_role_that_loses_commits_is_named(
        self, shop: Path, careless_role: str, database_url: str
    ) -> None:
        found = findings(shop, database_url)

        told = [one for one in found if careless_role in one["detail"]]
        assert [(one["level"], one["subject"]) for one in told] == [("wrong", "synchronous_commit")]
        assert f'run ALTER ROLE "{careless_role}" RESET synchronous_commit' in told[0]["detail"]


def test_settings_of_the_server_that_endanger_jobs_come_with_what_mends_them(
    shop: Path, server_directory: Path
) -> None:
    """On a server of their own: they change it for all its databases."""
    careless = ("fsync", "full_page_writes", "synchronous_commit", "autovacuum")
    with EmbeddedPostgres(server_directory / "careless") as server:
        engine = create_engine(server.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        upgrade_database(engine)

        def settings() -> list[str]:
            with engine.connect() as connection:
                return [connection.scalar(text(f"SHOW {name}")) or "" for name in careless]

        with engine.connect() as connection:
            for name in careless:
                connection.execute(text(f"ALTER SYSTEM SET {name} = off"))
            connection.execute(text("SELECT pg_reload_conf()"))
        wait_until(lambda: settings() == ["off"] * 4)
        told = findings(shop, server.url)
        details = [about(told, name)[1] for name in careless]
        with engine.connect() as connection:
            for detail in details:
                for step in detail.partition("; run ")[2].rstrip(";").split(";"):
                    connection.execute(text(step))
        wait_until(lambda: settings() == ["on"] * 4)
        mended = findings(shop, server.url)

    assert [about(told, name)[0] for name in careless] == ["wrong"] * 3 + ["warning"]
    assert {one["level"] for one in mended if one["subject"] in careless} == {"ok"}
