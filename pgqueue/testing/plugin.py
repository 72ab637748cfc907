"""Fixtures and a marker for pytest, which loads this module wherever pgqueue is installed.

An application overrides two fixtures in its ``conftest.py``: ``pgqueue_queue`` returns its
PgQueue, and ``pgqueue_create_tables`` returns a function that creates its tables.
"""

import os
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, NullPool, create_engine
from sqlalchemy.orm import Session

from pgqueue.job_queue import PgQueue
from pgqueue.schema import upgrade_database
from pgqueue.testing.assertions import enqueued
from pgqueue.testing.databases import fresh_database, run_server
from pgqueue.testing.running import QUEUE

MARKER = "assert_no_pending"
SESSION = "pgqueue_session"

CreateTables = Callable[[Engine], object]


def pytest_configure(config: pytest.Config) -> None:
    words = "fail the test if jobs wait at its end, as its session sees them"
    config.addinivalue_line("markers", f"{MARKER}(session='{SESSION}'): {words}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Check the marker after the test, and before its fixtures are torn down."""
    yield
    if (marker := item.get_closest_marker(MARKER)) is None:
        return
    name = str(marker.args[0] if marker.args else SESSION)
    session = getattr(item, "funcargs", {}).get(name)
    if session is None:
        pytest.fail(f"{MARKER}: the test does not use the fixture {name!r}", pytrace=False)
    left = enqueued(session)
    if left:
        lines = [f"  job {job.id} {job.task}: {job.args}, to run at {job.run_at}" for job in left]
        wait = "1 job waits" if len(left) == 1 else f"{len(left)} jobs wait"
        pytest.fail("\n".join([f"{wait} at the end of the test:", *lines]), pytrace=False)


@pytest.fixture(scope="session")
def pgqueue_server_url() -> Iterator[str]:
    """The URL of a PostgreSQL server for this run; the processes of pytest-xdist share it.

    Set ``PGQUEUE_TEST_URL`` to use a server of your own, with a role that may create databases.
    """
    with run_server(os.environ.get("PYTEST_XDIST_TESTRUNUID")) as url:
        yield url


@pytest.fixture(scope="session")
def pgqueue_create_tables() -> CreateTables:
    """Override: return a function that creates the application's tables on an engine."""
    return lambda engine: None


@pytest.fixture(scope="session")
def pgqueue_queue() -> PgQueue:
    """Override: return the application's PgQueue."""
    raise pytest.UsageError(
        "define a fixture pgqueue_queue with scope='session' in conftest.py that returns the "
        "PgQueue of your application"
    )


@pytest.fixture(scope="session")
def pgqueue_template_url(
    pgqueue_server_url: str, pgqueue_create_tables: CreateTables
) -> Iterator[str]:
    """A database with all tables, of which the others are copies; never connect to it."""
    with fresh_database(pgqueue_server_url) as url:
        engine = create_engine(url, poolclass=NullPool)
        upgrade_database(engine)
        pgqueue_create_tables(engine)
        yield url


@pytest.fixture(scope="session")
def pgqueue_engine(pgqueue_server_url: str, pgqueue_template_url: str) -> Iterator[Engine]:
    """An engine on the database of this process, for tests that commit nothing."""
    with fresh_database(pgqueue_server_url, template_url=pgqueue_template_url) as url:
        engine = create_engine(url)
        yield engine
        engine.dispose()


@pytest.fixture
def pgqueue_session(pgqueue_engine: Engine, pgqueue_queue: PgQueue) -> Iterator[Session]:
    """A Session in a transaction that is rolled back after the test, and the queue with it.

    The Session's commits and rollbacks end savepoints.
    """
    with pgqueue_engine.connect() as connection, pgqueue_queue.bound_to(connection):
        transaction = connection.begin()
        with pgqueue_queue.session() as session:
            session.info[QUEUE] = pgqueue_queue
            yield session
        transaction.rollback()


@pytest.fixture
def pgqueue_database(
    pgqueue_server_url: str, pgqueue_template_url: str, pgqueue_queue: PgQueue
) -> Iterator[Engine]:
    """An engine on a database for this test alone, to which the queue is bound.

    For tests that commit, and for those of a Worker.
    """
    with fresh_database(pgqueue_server_url, template_url=pgqueue_template_url) as url:
        engine = create_engine(url)
        with pgqueue_queue.bound_to(engine):
            yield engine
        engine.dispose()
