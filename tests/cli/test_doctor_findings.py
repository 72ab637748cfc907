"""Each trouble around the tables, planted, is found and told with what mends it."""

import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from shop_rig import assert_one_line, pgqueue, wait_until, write_shop
from sqlalchemy import URL, Engine, NullPool, create_engine, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from pgqueue import PgQueue
from pgqueue.cli.doctor import (
    Finding,
    Level,
    of_connection,
    of_notifications,
    of_search_path,
    of_server,
    of_slots,
    of_tables,
    of_transactions,
)
from pgqueue.embedded import EmbeddedPostgres
from pgqueue.repository import Health
from pgqueue.schema import upgrade_database

AT_ONCE = timedelta(0)


def about(subject: str, findings: Iterator[Finding]) -> str:
    """The one warning about a subject."""
    [one] = [found for found in findings if found.subject == subject]
    assert one.level is Level.WARNING
    return one.detail


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path)


def test_the_session_with_the_oldest_snapshot_is_named(engine: Engine, session: Session) -> None:
    reports = create_engine(engine.url, connect_args={"application_name": "monthly report"})
    with reports.connect() as connection:
        connection.execution_options(isolation_level="REPEATABLE READ")
        pid = connection.scalar(text("SELECT pg_backend_pid()"))

        found = about("old transaction", of_transactions(Health(session), older_than=AT_ONCE))

        assert f"session {pid} of {engine.url.username} (monthly report)" in found
        assert "idle in transaction, open for 0 s" in found
        remedy = found.partition("or run ")[2]
        session.execute(text(remedy))
        connection.invalidate()
    assert remedy == f"SELECT pg_terminate_backend({pid})"
    reports.dispose()


def test_a_prepared_transaction_is_named(engine: Engine, session: Session) -> None:
    if session.scalar(text("SELECT current_setting('max_prepared_transactions')")) == "0":
        pytest.skip("this server prepares no transactions")
    with engine.connect() as connection:
        connection.execute(text("INSERT INTO pgqueue.queues (name) VALUES ('q')"))
        connection.exec_driver_sql("PREPARE TRANSACTION 'it''s forgotten'")

    found = about("old transaction", of_transactions(Health(session), older_than=AT_ONCE))

    remedy = found.partition("or run ")[2]
    assert remedy == "ROLLBACK PREPARED 'it''s forgotten'"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(remedy)
    assert [one.level for one in of_transactions(Health(session), older_than=AT_ONCE)] == ["ok"]


def test_dead_rows_that_outnumber_the_living_are_named(engine: Engine, session: Session) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE pgqueue.queues SET (autovacuum_enabled = off)"))
        names = "INSERT INTO pgqueue.queues (name) SELECT 'q' || n FROM generate_series(1, :n) AS n"
        connection.execute(text(names), {"n": 12_000})
        connection.execute(text("DELETE FROM pgqueue.queues"))
    engine.dispose()  # a server process reports what it has done when it ends

    def found() -> list[str]:
        session.rollback()
        return [one.detail for one in of_tables(Health(session).tables())]

    while not found():
        pass
    [detail] = found()

    assert "pgqueue.queues has 12,000 dead rows beside 0 that live" in detail
    assert detail.endswith("run VACUUM pgqueue.queues")


def test_a_limit_of_the_server_below_that_of_a_task_is_named(
    engine: Engine, session: Session
) -> None:
    queue = PgQueue(engine)
    setting = "statement_timeout"
    queue.task(name="quick", timeout=timedelta(seconds=2))(lambda: None)
    session.execute(text(f"SET LOCAL {setting} = '5s'"))
    assert setting not in {one.subject for one in of_server(queue, Health(session))}

    queue.task(name="slow", timeout=timedelta(minutes=2))(lambda: None)
    detail = about(setting, of_server(queue, Health(session)))
    queue.task(name="endless")(lambda: None)
    endless = about(setting, of_server(queue, Health(session)))

    assert detail.startswith("5 s for this role, and task slow runs for up to 2 minutes")
    assert f"ALTER ROLE ... SET {setting} = 0" in detail
    assert "task endless runs without a timeout" in endless


def test_one_that_workers_raise_is_named_for_a_task_without_a_timeout(
    engine: Engine, session: Session
) -> None:
    queue = PgQueue(engine)
    setting = "idle_in_transaction_session_timeout"
    queue.task(name="slow", timeout=timedelta(minutes=2))(lambda: None)
    session.execute(text(f"SET LOCAL {setting} = '5s'"))
    assert setting not in {one.subject for one in of_server(queue, Health(session))}

    queue.task(name="endless")(lambda: None)

    detail = about(setting, of_server(queue, Health(session)))
    assert detail.startswith("5 s for this role, and task endless runs without a timeout")


@pytest.mark.parametrize("value", ["1500", "1500ms", "1.5s"])
def test_so_is_one_of_another_role(engine: Engine, session: Session, value: str) -> None:
    queue = PgQueue(engine)
    queue.task(name="endless")(lambda: None)
    session.execute(text("CREATE ROLE hasty"))
    session.execute(text(f"ALTER ROLE hasty SET statement_timeout = '{value}'"))

    detail = about("statement_timeout", of_server(queue, Health(session)))

    assert detail.startswith("1.5 s for the role hasty")


@pytest.mark.parametrize(
    ("address", "is_encrypted", "is_told"),
    [
        ("10.1.2.3", False, True),
        ("2001:db8::1", False, True),
        ("10.1.2.3", True, False),
        ("127.0.0.1", False, False),
        ("::1", False, False),
        (None, False, False),
    ],
)
def test_a_connection_in_clear_to_another_machine_is_told(
    address: str | None, is_encrypted: bool, is_told: bool
) -> None:
    found = [one.detail for one in of_connection(address, is_encrypted)]

    assert len(found) == is_told
    assert all("?sslmode=verify-full" in detail for detail in found)


def test_a_queue_of_notifications_that_fills_is_told() -> None:
    assert list(of_notifications(0.1)) == []
    assert "11% of the server's queue" in about("notifications", of_notifications(0.11))


def test_the_server_is_asked_for_all_of_it(session: Session) -> None:
    health = Health(session)

    assert 0 <= health.notification_queue_usage() < 0.1
    address, is_encrypted = health.connection()
    assert address in (None, "127.0.0.1", "::1")
    assert is_encrypted is False


def test_rows_that_break_a_rule_come_with_what_mends_them(
    shop: Path, engine: Engine, database_url: str
) -> None:
    with engine.begin() as connection:
        lease = "(target_id, message_id, attempt, worker_id, started_at)"
        values = "(7, 7, 1, gen_random_uuid(), now() - interval '1 hour')"
        connection.execute(text(f"INSERT INTO pgqueue.leases {lease} VALUES {values}"))
        connection.execute(text("INSERT INTO pgqueue.jobs (task) VALUES ('lost')"))

    ended = pgqueue(shop, "--url", database_url, "doctor")

    assert ended.returncode == 1
    assert 'to mend it run DELETE FROM "pgqueue".leases WHERE target_id = 7' in ended.stdout
    assert "to mend it run pgqueue worker" in ended.stdout
    assert "to mend it run pgqueue cancel 1; pgqueue requeue 1" in ended.stdout


def test_a_partitioned_table_is_wrong(shop: Path, engine: Engine, database_url: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE pgqueue.message_queue RENAME TO plain"))
        like = "(LIKE pgqueue.plain) PARTITION BY LIST (queue)"
        connection.execute(text(f"CREATE TABLE pgqueue.message_queue {like}"))

    ended = pgqueue(shop, "--url", database_url, "doctor")

    assert ended.returncode == 1
    assert "wrong    schema: pgqueue.message_queue is missing, partitioned" in ended.stdout


def lets_in(url: URL) -> bool:
    engine = create_engine(url, poolclass=NullPool)
    try:
        engine.connect().close()
    except OperationalError:
        return False
    return True


def test_a_slot_a_wrong_password_and_a_standby_are_told(shop: Path, server_directory: Path) -> None:
    """On a server of their own: they change what all its databases see."""
    settings = {"wal_level": "logical", "max_replication_slots": "2"}
    server = EmbeddedPostgres(server_directory / "server", durable=False, settings=settings)
    with server:
        engine = create_engine(server.url, isolation_level="AUTOCOMMIT")
        upgrade_database(engine)
        with Session(engine) as session:
            slot = "SELECT pg_create_logical_replication_slot('old_copy', 'pgoutput')"
            session.execute(text(slot))
            session.execute(text("SELECT pg_current_xact_id()"))
            found = about("replication slot", of_slots(Health(session).slots()))
            remedy = found.partition("is gone, run ")[2]
            session.execute(text(remedy))
            assert list(of_slots(Health(session).slots())) == []
            session.execute(text("CREATE ROLE guarded LOGIN PASSWORD 'right'"))
            [hba] = session.scalars(text("SELECT current_setting('hba_file')"))
            rules = Path(hba)
            lines = "local all guarded scram-sha-256\nhost all guarded all scram-sha-256\n"
            rules.write_text(lines + rules.read_text())
            session.execute(text("SELECT pg_reload_conf()"))
        engine.dispose()
        guarded = make_url(server.url).set(username="guarded", password="wr0ng")
        wait_until(lambda: not lets_in(guarded))
        refused = pgqueue(shop, "--url", guarded.render_as_string(False), "doctor")

        (rules.parent / "standby.signal").touch()
        server.restart()
        standby = pgqueue(shop, "--url", server.url, "doctor")

    assert "slot old_copy is read by nobody and keeps the write-ahead log and what died" in found
    assert remedy == "SELECT pg_drop_replication_slot('old_copy')"
    assert_one_line(refused, "password authentication failed")
    assert "wr0ng" not in refused.stderr
    assert standby.returncode == 1
    assert "this server is a standby: jobs are written on its primary" in standby.stdout


@pytest.fixture
def stranger(engine: Engine) -> Iterator[str]:
    """A role that owns nothing."""
    name = f"Stranger {uuid.uuid4().hex[:8]}"
    with engine.begin() as connection:
        connection.exec_driver_sql(f'CREATE ROLE "{name}"')
    yield name
    with engine.begin() as connection:
        connection.exec_driver_sql(f'DROP OWNED BY "{name}"; DROP ROLE "{name}"')


def test_who_else_may_create_in_the_search_path_is_named(stranger: str, session: Session) -> None:
    session.execute(text("CREATE SCHEMA beside"))
    session.execute(text("CREATE SCHEMA before"))
    session.execute(text(f'GRANT CREATE ON SCHEMA before TO "{stranger}"'))
    session.execute(text("GRANT CREATE ON SCHEMA public, beside TO PUBLIC"))
    session.execute(text("SET LOCAL search_path = before, pg_catalog, public"))
    health = Health(session)

    found = [one.detail for one in of_search_path(health.creators_in_search_path())]

    remedies = [detail.partition("; run ")[2] for detail in found]
    assert remedies == [
        f'REVOKE CREATE ON SCHEMA "before" FROM "{stranger}"',
        'REVOKE CREATE ON SCHEMA "public" FROM PUBLIC',
    ]
    assert ["before pg_catalog" in detail for detail in found] == [True, False]
    assert ["everybody" in detail for detail in found] == [False, True]
    for remedy in remedies:
        session.execute(text(remedy))
    assert health.creators_in_search_path() == []


def test_who_may_do_as_we_do_anyhow_is_not_named(stranger: str, session: Session) -> None:
    session.execute(text("REVOKE CREATE ON SCHEMA public FROM PUBLIC"))  # as since PostgreSQL 15
    session.commit()
    grant = text(f'GRANT CREATE ON SCHEMA public TO "{stranger}"')
    session.execute(grant)
    session.execute(text(f'ALTER SCHEMA pgqueue OWNER TO "{stranger}"'))
    as_owner = Health(session).creators_in_search_path()
    session.rollback()

    session.execute(grant)
    session.execute(text(f'ALTER ROLE "{stranger}" SUPERUSER'))
    as_superuser = Health(session).creators_in_search_path()
    session.rollback()

    session.execute(grant)
    session.execute(text(f'SET LOCAL ROLE "{stranger}"'))
    as_oneself = Health(session).creators_in_search_path()

    assert (as_owner, as_superuser, as_oneself) == ([], [], [])
