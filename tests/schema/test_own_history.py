"""Stand-alone upgrades: from any number of processes, by any driver, in any isolation."""

import multiprocessing
import subprocess
import sys
import uuid
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
from catalog import facts
from hosts import host_revision
from sqlalchemy import Engine, create_engine, make_url, text

from pgqueue.errors import SchemaError
from pgqueue.schema import SCHEMA_VERSION, upgrade, upgrade_database, verify
from pgqueue.schema.state import read_state

PROCESSES = 8
ISOLATION_LEVELS = ["AUTOCOMMIT", "READ COMMITTED", "SERIALIZABLE"]
HISTORY = text("SELECT version_num FROM pgqueue.alembic_version")
VERSIONS = text("SELECT version, oldest_code FROM pgqueue.schema_version")


@pytest.mark.parametrize("isolation_level", ["AUTOCOMMIT", "SERIALIZABLE"])
def test_eight_processes_at_once_write_one_history(
    empty_engine: Engine, isolation_level: str
) -> None:
    forked = multiprocessing.get_context("fork")
    start = forked.Barrier(PROCESSES)
    url = empty_engine.url.render_as_string(hide_password=False)
    arguments = (start, url, isolation_level)
    processes = [forked.Process(target=upgrade_when, args=arguments) for _ in range(PROCESSES)]

    for process in processes:
        process.start()
    for process in processes:
        process.join()

    assert [process.exitcode for process in processes] == [0] * PROCESSES
    with empty_engine.connect() as connection:
        assert connection.execute(HISTORY).all() == [(f"pgqueue_{SCHEMA_VERSION:04}",)]
        assert connection.execute(VERSIONS).all() == [(SCHEMA_VERSION, 1)]


def upgrade_when(start: Barrier, url: str, isolation_level: Any) -> None:
    engine = create_engine(url, isolation_level=isolation_level)
    start.wait()
    upgrade_database(engine)


@pytest.mark.parametrize(
    ("driver", "isolation_level"),
    [*(("psycopg", level) for level in ISOLATION_LEVELS), ("psycopg2", None)],
)
def test_any_driver_and_isolation_gives_the_same_tables(
    empty_database_url: str, database_url: str, driver: str, isolation_level: Any
) -> None:
    url = make_url(empty_database_url).set(drivername=f"postgresql+{driver}")
    engine = create_engine(url, isolation_level=isolation_level)

    upgrade_database(engine)

    engine.dispose()
    assert facts(empty_database_url) == facts(database_url)


def test_an_engine_made_of_another_will_do(empty_engine: Engine, database_url: str) -> None:
    upgrade_database(empty_engine.execution_options(logging_token="upgrade"))

    assert facts(empty_engine.url.render_as_string(False)) == facts(database_url)


def test_a_failed_upgrade_leaves_nothing_behind(empty_engine: Engine) -> None:
    with empty_engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA pgqueue"))
        connection.execute(text("CREATE TABLE pgqueue.queues (in_the_way integer)"))

    with pytest.raises(Exception, match="already exists"):
        upgrade_database(empty_engine)

    with empty_engine.connect() as connection:
        assert connection.scalar(text("SELECT to_regclass('pgqueue.alembic_version')")) is None


def test_a_role_that_may_only_fill_a_given_schema_can_upgrade(empty_engine: Engine) -> None:
    role = f"tenant_{uuid.uuid4().hex[:12]}"
    with empty_engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'"))
        connection.execute(text(f"CREATE SCHEMA pgqueue AUTHORIZATION {role}"))
    tenant = create_engine(empty_engine.url.set(username=role, password="secret"))

    try:
        upgrade_database(tenant)

        with tenant.connect() as connection:
            verify(connection)
    finally:
        tenant.dispose()
        with empty_engine.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))


def test_an_older_process_leaves_newer_tables_alone(engine: Engine) -> None:
    with engine.begin() as connection:
        newer = f"UPDATE pgqueue.schema_version SET version = {SCHEMA_VERSION + 1}"
        connection.execute(text(newer))
        connection.execute(text("UPDATE pgqueue.alembic_version SET version_num = 'pgqueue_0099'"))

    upgrade_database(engine)

    with engine.connect() as connection:
        assert connection.execute(VERSIONS).all() == [(SCHEMA_VERSION + 1, SCHEMA_VERSION)]


def test_tables_from_before_the_first_release_are_to_be_made_anew(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE pgqueue.schema_version SET version = 16, oldest_code = 1"))
        connection.execute(text("UPDATE pgqueue.alembic_version SET version_num = 'pgqueue_0016'"))

    with pytest.raises(SchemaError, match='run `DROP SCHEMA "pgqueue" CASCADE`'):
        upgrade_database(engine)
    with engine.connect() as connection, pytest.raises(SchemaError, match="before the first"):
        verify(connection)
    with (
        engine.begin() as connection,
        host_revision(connection),
        pytest.raises(SchemaError, match=r"upgrade\(to=1, base=0\)"),
    ):
        upgrade(to=SCHEMA_VERSION)


def test_tables_a_host_brought_are_left_alone_while_they_are_current(
    empty_engine: Engine,
) -> None:
    with empty_engine.begin() as connection, host_revision(connection):
        upgrade(to=SCHEMA_VERSION)

    upgrade_database(empty_engine)

    with empty_engine.connect() as connection:
        assert connection.scalar(text("SELECT to_regclass('pgqueue.alembic_version')")) is None


def test_tables_a_host_brought_are_upgraded_by_the_host_alone(empty_engine: Engine) -> None:
    with empty_engine.begin() as connection, host_revision(connection):
        upgrade(to=SCHEMA_VERSION)
        connection.execute(text("UPDATE pgqueue.schema_version SET version = 0"))

    with pytest.raises(
        SchemaError, match=rf"`pgqueue\.schema\.upgrade\(to={SCHEMA_VERSION}, base=0\)`"
    ):
        upgrade_database(empty_engine)


def test_a_history_without_its_tables_is_not_taken_for_an_upgraded_one(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE pgqueue.schema_version"))

    with pytest.raises(SchemaError, match="the tables are gone"):
        upgrade_database(engine)


def test_importing_the_package_does_not_import_alembic() -> None:
    program = "import sys, pgqueue, pgqueue.schema; print('alembic' in sys.modules)"

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert run.stdout == "False\n", run.stderr


def test_a_lost_version_is_written_again_if_the_tables_are_up_to_date(engine: Engine) -> None:
    """As in a copy by ``pg_dump --exclude-table-data='pgqueue.*'``, or after a TRUNCATE."""
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE pgqueue.schema_version, pgqueue.alembic_version"))

    upgrade_database(engine)

    with engine.connect() as connection:
        verify(connection)
        assert read_state(connection).revision == f"pgqueue_{SCHEMA_VERSION:04}"


def test_a_lost_version_is_not_guessed_for_other_tables(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE pgqueue.schema_version"))
        connection.execute(text("ALTER TABLE pgqueue.jobs DROP COLUMN tags CASCADE"))

    with pytest.raises(SchemaError, match="not those of version"):
        upgrade_database(engine)
