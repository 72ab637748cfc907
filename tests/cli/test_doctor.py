"""``pgqueue doctor``: each problem, planted, is found and told with what mends it."""

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from shop_rig import assert_one_line, command, pgqueue, wait_until
from sqlalchemy import URL, Engine, NullPool, create_engine, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateTable

from chaos.interleavings.logical_workers import logical_workers, worker_settings
from pgqueue import Limit, PgQueue
from pgqueue.embedded import EmbeddedPostgres
from pgqueue.models.base import Base
from pgqueue.repository.health import Health
from pgqueue.repository.limits import Limits
from pgqueue.schema import upgrade_database
from pgqueue.views.findings import (
    Finding,
    Level,
    of_notifications,
    of_row_security,
    of_server,
    of_tables,
    of_transactions,
)

AT_ONCE = timedelta(0)
CARELESS = ("fsync", "full_page_writes", "synchronous_commit", "autovacuum")


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)
    queue.task(name="add")(lambda: None)
    return queue


def findings(queue: PgQueue) -> list[dict[str, Any]]:
    ended = command(queue, "doctor", "--json")
    assert ended.stderr == ""
    document = json.loads(ended.stdout)
    levels = {finding["level"] for finding in document["findings"]}
    assert document["is_sound"] is (ended.returncode == 0) is ("wrong" not in levels)
    found: list[dict[str, Any]] = document["findings"]
    return found


def about(found: list[dict[str, Any]], subject: str) -> tuple[str, str]:
    """Level and detail of the one finding about a subject."""
    [one] = [finding for finding in found if finding["subject"] == subject]
    return one["level"], one["detail"]


def warning(subject: str, found: Iterator[Finding]) -> str:
    """The one warning about a subject."""
    [one] = [finding for finding in found if finding.subject == subject]
    assert one.level is Level.WARNING
    return one.detail


class TestJobsThatDoNotRun:
    def test_where_all_jobs_run_each_check_says_so(self, queue: PgQueue) -> None:
        found = findings(queue)

        sound = ("schema", "invariants", "tasks", "retention", "arguments", "workers")
        for subject in (*sound, "schedules", "limits", "transactions"):
            assert about(found, subject)[0] == "ok"

    @pytest.mark.parametrize(
        ("subject", "words"),
        [
            ("unknown task", "this application has no task lost, of which 1 job is due (since"),
            ("workers", "no live worker serves queue attic, where 1 job is due (since"),
            ("unreadable jobs", "1 job waits (the oldest since 5 min), and no worker could read"),
            ("retention", "1 ended jobs belong to tasks that this application does not have"),
            ("limits", "1 job waits: no worker has declared limit bank"),
        ],
    )
    def test_each_reason_why_jobs_do_not_run_is_told(
        self, queue: PgQueue, engine: Engine, subject: str, words: str
    ) -> None:
        other = PgQueue(engine)
        lost = other.task(name="lost", queue="attic")(lambda: None)
        lost.delay()
        limited = other.task(name="pay", limit=Limit(2, name="bank"))(lambda: None)
        limited.options(delay=timedelta(hours=1)).delay()
        met = "INSERT INTO pgqueue.unreadable_jobs (job_id, task, reason, since) VALUES "
        ended = "INSERT INTO pgqueue.jobs (task, outcome, finished_at, attempts) VALUES "
        with engine.begin() as connection:
            connection.execute(text(f"{met} (1, 'lost', 'why', now() - interval '5 minutes')"))
            connection.execute(text(f"{ended} ('old', 'succeeded', now(), 1)"))
            # Of a job that has ended, so that its row no longer matters.
            connection.execute(text(f"{met} (3, 'old', 'over', now())"))

        level, detail = about(findings(queue), subject)

        assert (level, detail.startswith(words)) == ("warning", True), detail

    def test_without_the_app_its_tasks_are_not_missed(self, engine: Engine) -> None:
        PgQueue(engine).task(name="lost")(lambda: None).delay()

        subjects = {one["subject"] for one in findings(PgQueue(engine))}

        assert "workers" in subjects
        assert not {"unknown task", "tasks", "retention"} & subjects

    def test_a_job_that_workers_skip_is_named_with_its_key(
        self, queue: PgQueue, engine: Engine, database_url: str
    ) -> None:
        limit = Limit(1, by="account", name="accounts")

        @queue.task(name="pay", limit=limit)
        def pay(account: int) -> None: ...

        skipped, _blocked = pay.delay(7).id, pay.delay(8).id
        with engine.begin() as connection:
            Limits(connection).declare([limit])
            Limits(connection).set_capacity_of_key("accounts", "accounts [8]", 0)
            for table in ("jobs", "waiting_messages"):
                earlier = "SET run_at = run_at - interval '10 minutes'"
                connection.execute(text(f"UPDATE pgqueue.{table} {earlier}"))

        with logical_workers(worker_settings(database_url), 1):  # which admits nothing
            level, detail = about(findings(queue), "admission")

        assert level == "warning"
        assert detail.startswith(f"job {skipped} has waited for accounts [7] in queue default")
        assert f"run pgqueue cancel {skipped}" in detail


class TestTables:
    def test_rows_that_break_a_rule_come_with_what_mends_them(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        with engine.begin() as connection:
            lease = "(target_id, message_id, attempt, worker_id, started_at)"
            values = "(7, 7, 1, gen_random_uuid(), now() - interval '1 hour')"
            connection.execute(text(f"INSERT INTO pgqueue.leases {lease} VALUES {values}"))
            connection.execute(text("INSERT INTO pgqueue.jobs (task) VALUES ('lost')"))

        ended = command(queue, "doctor")

        assert ended.returncode == 1
        assert 'to mend it run DELETE FROM "pgqueue".leases WHERE target_id = 7' in ended.stdout
        assert "to mend it run pgqueue worker" in ended.stdout
        assert "to mend it run pgqueue cancel 1; pgqueue requeue 1" in ended.stdout

    def test_missing_or_partitioned_tables_are_wrong(
        self, queue: PgQueue, engine: Engine, empty_engine: Engine
    ) -> None:
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE pgqueue.message_queue RENAME TO plain"))
            like = "(LIKE pgqueue.plain) PARTITION BY LIST (queue)"
            connection.execute(text(f"CREATE TABLE pgqueue.message_queue {like}"))

        level, detail = about(findings(queue), "schema")

        assert level == "wrong"
        assert "pgqueue.message_queue is missing, partitioned" in detail
        assert about(findings(PgQueue(empty_engine)), "schema")[0] == "wrong"

    def test_a_dropped_index_comes_with_what_makes_it_again(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        with engine.begin() as connection:
            connection.execute(text("DROP INDEX pgqueue.jobs_held_unique_key"))

        level, detail = about(findings(queue), "tables")
        what, _, command = detail.partition("as the owner of the tables run ")

        assert (level, what) == ("wrong", "index jobs_held_unique_key of pgqueue.jobs is missing; ")
        with engine.begin() as connection:
            connection.execute(text(command))
        assert "tables" not in {finding["subject"] for finding in findings(queue)}

    def test_a_dropped_column_and_a_dropped_table_are_wrong(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE pgqueue.jobs DROP tags CASCADE"))
            connection.execute(text("DROP TABLE pgqueue.deploys"))

        wrong = [one["detail"] for one in findings(queue) if one["level"] == "wrong"]

        assert "column tags of pgqueue.jobs is missing" in wrong
        assert "table pgqueue.deploys is missing" in wrong

    @pytest.mark.parametrize("name", ["jobs_finished_at", "schedules_tick", "leases_pkey"])
    def test_a_dropped_constraint_comes_with_what_makes_it_again(
        self, queue: PgQueue, engine: Engine, name: str
    ) -> None:
        table = name.partition("_")[0]
        created = str(CreateTable(Base.metadata.tables[f"pgqueue.{table}"]))
        with engine.begin() as connection:
            connection.execute(text(f"ALTER TABLE pgqueue.{table} DROP CONSTRAINT {name}"))

        level, detail = about(findings(queue), "tables")
        what, _, command = detail.partition("as the owner of the tables run ")

        assert level == "wrong"
        assert what == f"constraint {name} of pgqueue.{table} is missing; "
        assert str(CreateTable(Base.metadata.tables[f"pgqueue.{table}"])) == created
        with engine.begin() as connection:
            connection.execute(text(command))
        assert "tables" not in {finding["subject"] for finding in findings(queue)}

    def test_a_dropped_view_is_wrong(self, queue: PgQueue, engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text("DROP VIEW pgqueue.job_overview"))

        assert about(findings(queue), "tables") == ("wrong", "view pgqueue.job_overview is missing")

    def test_a_dropped_function_is_wrong(self, queue: PgQueue, engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text("DROP FUNCTION pgqueue.enqueue"))

        assert about(findings(queue), "tables") == ("wrong", "function pgqueue.enqueue is missing")

    def test_tables_without_autovacuum_are_named(self, queue: PgQueue, engine: Engine) -> None:
        with engine.begin() as connection:
            off = "ALTER TABLE pgqueue.leases SET (autovacuum_enabled = 'no')"
            connection.execute(text(off))

        level, detail = about(findings(queue), "autovacuum")

        assert (level, detail.startswith("off for pgqueue.leases: ")) == ("warning", True)

    def test_dead_rows_that_outnumber_the_living_are_named(
        self, engine: Engine, session: Session
    ) -> None:
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE pgqueue.queues SET (autovacuum_enabled = off)"))
            names = "INSERT INTO pgqueue.queues (name) SELECT 'q' || n FROM generate_series(1, :n)"
            connection.execute(text(f"{names} AS n"), {"n": 12_000})
            connection.execute(text("DELETE FROM pgqueue.queues"))
        engine.dispose()  # a server process reports what it has done when it ends

        def found() -> list[str]:
            session.rollback()
            return [one.detail for one in of_tables(Health(session).tables())]

        wait_until(lambda: bool(found()))
        [detail] = found()

        assert "pgqueue.queues has 12,000 dead rows beside 0 that live" in detail
        assert detail.endswith("run VACUUM pgqueue.queues")


class TestSessions:
    def test_a_session_with_an_old_snapshot_is_named(
        self, engine: Engine, session: Session
    ) -> None:
        reports = create_engine(engine.url, connect_args={"application_name": "monthly report"})
        with reports.connect() as connection:
            connection.execution_options(isolation_level="REPEATABLE READ")
            pid = connection.scalar(text("SELECT pg_backend_pid()"))

            found = warning("old transaction", of_transactions(Health(session), older_than=AT_ONCE))

            remedy = found.partition("or run ")[2]
            session.execute(text(remedy))
            connection.invalidate()
        assert f"session {pid} of {engine.url.username} (monthly report)" in found
        assert "idle in transaction, open for" in found
        assert remedy == f"SELECT pg_terminate_backend({pid})"
        reports.dispose()

    def test_a_prepared_transaction_is_named(self, engine: Engine, session: Session) -> None:
        if session.scalar(text("SELECT current_setting('max_prepared_transactions')")) == "0":
            pytest.skip("this server prepares no transactions")
        with engine.connect() as connection:
            connection.execute(text("INSERT INTO pgqueue.queues (name) VALUES ('q')"))
            connection.exec_driver_sql("PREPARE TRANSACTION 'it''s forgotten'")

        found = warning("old transaction", of_transactions(Health(session), older_than=AT_ONCE))

        remedy = found.partition("or run ")[2]
        assert remedy == "ROLLBACK PREPARED 'it''s forgotten'"
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql(remedy)
        assert [one.level for one in of_transactions(Health(session), older_than=AT_ONCE)] == ["ok"]


class TestSettings:
    @pytest.fixture
    def name(self, session: Session) -> str:
        return str(session.scalars(text("SELECT current_database()")).one())

    @pytest.mark.parametrize(
        ("setting", "subject", "words"),
        [
            (
                "synchronous_commit = off",
                "synchronous_commit",
                "off, by the database: a crash of the server loses jobs whose commit was "
                "acknowledged; run ALTER DATABASE ... RESET synchronous_commit",
            ),
            (
                "default_transaction_read_only = on",
                "transaction_read_only",
                "on: jobs cannot be written here; run ALTER DATABASE ... RESET",
            ),
        ],
    )
    def test_settings_that_lose_or_refuse_jobs_are_wrong(
        self, engine: Engine, name: str, setting: str, subject: str, words: str
    ) -> None:
        with engine.begin() as connection:
            connection.execute(text(f"ALTER DATABASE {name} SET {setting}"))
        engine.dispose()

        level, detail = about(findings(PgQueue(engine)), subject)

        assert (level, detail.startswith(words)) == ("wrong", True), detail

    @pytest.mark.parametrize(
        ("setting", "is_raised"),
        [("statement_timeout", False), ("idle_in_transaction_session_timeout", True)],
    )
    def test_a_limit_below_that_of_a_task_is_named_unless_workers_raise_it(
        self, engine: Engine, session: Session, setting: str, is_raised: bool
    ) -> None:
        queue = PgQueue(engine)
        queue.task(name="quick", timeout=timedelta(seconds=2))(lambda: None)
        session.execute(text(f"SET LOCAL {setting} = '5s'"))
        assert setting not in {one.subject for one in of_server(queue, Health(session))}

        queue.task(name="slow", timeout=timedelta(minutes=2))(lambda: None)
        slow = [one for one in of_server(queue, Health(session)) if one.subject == setting]
        queue.task(name="endless")(lambda: None)
        endless = warning(setting, of_server(queue, Health(session)))

        assert is_raised is not bool(slow)
        assert all("task slow runs for up to 2 min" in one.detail for one in slow)
        assert endless.startswith("5 s for this role, and task endless runs without a timeout")
        assert f"ALTER ROLE ... SET {setting} = 0" in endless

    def test_a_limit_of_another_role_is_named(self, queue: PgQueue, session: Session) -> None:
        session.execute(text("CREATE ROLE hasty"))
        session.execute(text("ALTER ROLE hasty SET statement_timeout = '1.5s'"))

        detail = warning("statement_timeout", of_server(queue, Health(session)))

        assert detail.startswith("1.5 s for the role hasty")

    def test_row_security_names_the_table_and_the_roles_that_do_not_see_all(
        self, session: Session
    ) -> None:
        assert list(of_row_security(session)) == []
        for statement in (
            "CREATE ROLE short_sighted",
            "CREATE ROLE far_sighted BYPASSRLS",
            "GRANT SELECT ON pgqueue.jobs TO short_sighted, far_sighted",
            "ALTER TABLE pgqueue.jobs ENABLE ROW LEVEL SECURITY",
        ):
            session.execute(text(statement))

        detail = warning("row security", of_row_security(session))

        assert detail.startswith("on for pgqueue.jobs: it hides rows from short_sighted, and")
        assert "ALTER TABLE pgqueue.jobs DISABLE ROW LEVEL SECURITY" in detail

    def test_a_queue_of_notifications_that_fills_is_told(self, session: Session) -> None:
        assert list(of_notifications(Health(session).notification_queue_usage())) == []
        assert "11% of the server's queue" in warning("notifications", of_notifications(0.11))


def lets_in(url: URL) -> bool:
    engine = create_engine(url, poolclass=NullPool)
    try:
        engine.connect().close()
    except OperationalError:
        return False
    return True


def test_settings_of_a_server_a_wrong_password_and_a_standby_are_told(
    tmp_path: Path, server_directory: Path
) -> None:
    """On a server of their own: they change what all its databases see."""
    with EmbeddedPostgres(server_directory / "careless") as server:
        engine = create_engine(server.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        upgrade_database(engine)
        queue = PgQueue(create_engine(server.url, poolclass=NullPool))

        def run(*statements: str) -> None:
            with engine.connect() as connection:
                for statement in statements:
                    connection.execute(text(statement))

        def shows(value: str) -> Callable[[], bool]:
            def settings() -> bool:
                with engine.connect() as connection:
                    names = (text(f"SHOW {name}") for name in CARELESS)
                    return {connection.scalar(name) for name in names} == {value}

            return settings

        run(*(f"ALTER SYSTEM SET {name} = off" for name in CARELESS), "SELECT pg_reload_conf()")
        wait_until(shows("off"))
        told = findings(queue)
        for name in CARELESS:
            run(*about(told, name)[1].partition("; run ")[2].rstrip(";").split(";"))
        wait_until(shows("on"))
        mended = findings(queue)

        run("CREATE ROLE guarded LOGIN PASSWORD 'right'")
        with engine.connect() as connection:
            rules = Path(str(connection.scalar(text("SHOW hba_file"))))
        lines = "local all guarded scram-sha-256\nhost all guarded all scram-sha-256\n"
        rules.write_text(lines + rules.read_text())
        run("SELECT pg_reload_conf()")
        guarded = make_url(server.url).set(username="guarded", password="wr0ng")
        wait_until(lambda: not lets_in(guarded))
        refused = pgqueue(tmp_path, "--url", guarded.render_as_string(False), "doctor")

        (rules.parent / "standby.signal").touch()
        server.restart()
        standby = findings(queue)

    assert [about(told, name)[0] for name in CARELESS] == ["wrong"] * 3 + ["warning"]
    assert {one["level"] for one in mended if one["subject"] in CARELESS} == {"ok"}
    assert_one_line(refused, "password authentication failed")
    assert "wr0ng" not in refused.stderr
    level, detail = about(standby, "standby")
    assert level == "wrong"
    assert "this server is a standby: jobs are written on its primary" in detail
