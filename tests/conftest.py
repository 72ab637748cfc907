"""A real PostgreSQL for every test: your own by PGQUEUE_TEST_URL, or a private one."""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from sqlalchemy import Connection, Engine, NullPool, create_engine, make_url
from sqlalchemy.orm import Session

from chaos.folders import server_folder
from pgqueue.embedded import EmbeddedPostgres
from pgqueue.testing.databases import as_text, fresh_database, memory_directory

if TYPE_CHECKING:
    from chaos.interleavings.logical_workers import LogicalWorker

_OF_THE_TESTS = {
    *("PGQUEUE_TEST_URL", "PGQUEUE_PG_BIN", "PGQUEUE_TIMED", "PGQUEUE_SCREENSHOTS"),
    *("PGPASSWORD", "PGPASSFILE"),
}
_SETTINGS = {"max_connections": "200", "max_wal_size": "256MB", "max_prepared_transactions": "10"}


# What is slow here may be a machine that does something else: no test measures its speed.
UNHURRIED = settings(deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("make test", UNHURRIED, derandomize=True, max_examples=25)
settings.register_profile("make battery", UNHURRIED, max_examples=500)
settings.load_profile("make battery" if "PGQUEUE_TIMED" in os.environ else "make test")


def pytest_configure() -> None:
    """Nothing of the environment meant for other programs may reach the tests."""
    for name in set(os.environ) - _OF_THE_TESTS:
        if name.startswith(("PG", "FLASK_")) or name == "DATABASE_URL":
            del os.environ[name]
    # A shell ignores SIGINT for what runs in the background, and nohup SIGHUP; tests send both.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """More than there are cores, and more yet where tests wait for other processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    return cores + (4 if config.getoption("markexpr") in ("journey", "chaos") else 1)


def pytest_collection_finish() -> None:
    """What is there by now stays; to look for garbage in it again and again takes a tenth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The URL of a role that may create databases; each xdist worker has a server of its own."""
    if given := os.environ.get("PGQUEUE_TEST_URL"):
        yield as_text(make_url(given).set(drivername="postgresql+psycopg"))
        return
    server = EmbeddedPostgres(durable=False, settings=_SETTINGS)
    with pytest.MonkeyPatch.context() as patched:
        if (memory := memory_directory()) is not None:
            patched.setattr(tempfile, "tempdir", memory)
        server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def template_url(server_url: str) -> Iterator[str]:
    """A database that the migrations have brought up to date; others are copies of it."""
    from pgqueue.schema import upgrade_database

    with fresh_database(server_url) as url:
        engine = create_engine(url, poolclass=NullPool)
        upgrade_database(engine)
        yield url


@pytest.fixture
def empty_database_url(server_url: str) -> Iterator[str]:
    """A database with nothing in it."""
    with fresh_database(server_url) as url:
        yield url


@pytest.fixture
def database_url(server_url: str, template_url: str) -> Iterator[str]:
    """A database with pgqueue's tables."""
    with fresh_database(server_url, template_url=template_url) as url:
        yield url


@pytest.fixture(scope="session")
def statements(template_url: str) -> Engine:
    """Its dialect and compiled statements are those of all tests' engines.

    Each dialect has its own compiled statements, and to compile them takes more than to run them.
    """
    engine = create_engine(template_url, poolclass=NullPool, query_cache_size=10_000)
    with engine.connect():
        pass  # the dialect reads the properties of the server
    return engine


@pytest.fixture
def node_urls(server_url: str, template_url: str) -> Iterator[list[str]]:
    """Three databases with pgqueue's tables, as nodes that have no numbers yet."""
    with ExitStack() as stack:
        made = (fresh_database(server_url, template_url=template_url) for _ in range(3))
        yield [stack.enter_context(one) for one in made]


@pytest.fixture
def engine(database_url: str, statements: Engine) -> Iterator[Engine]:
    """An engine on a database with pgqueue's tables.

    A listener for an event of its dialect would hear of all tests: make another engine for it.
    """
    engine = create_engine(database_url)
    engine.dialect, engine._compiled_cache = statements.dialect, statements._compiled_cache
    yield engine
    engine.dispose()


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    """A transaction on a database with pgqueue's tables, committed at the end."""
    with engine.begin() as connection:
        yield connection


@pytest.fixture
def empty_engine(empty_database_url: str) -> Iterator[Engine]:
    """An engine on a database with nothing in it."""
    engine = create_engine(empty_database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def empty_connection(empty_engine: Engine) -> Iterator[Connection]:
    """A transaction on a database with nothing in it, committed at the end."""
    with empty_engine.begin() as connection:
        yield connection


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """A session on a database with pgqueue's tables; what it does not commit is rolled back."""
    with Session(engine) as session:
        yield session


@pytest.fixture
def worker(engine: Engine) -> "Iterator[LogicalWorker]":
    """A worker of nothing but connections."""
    from chaos.interleavings.logical_workers import workers_at

    with workers_at(engine, 1) as [worker]:
        yield worker


@pytest.fixture
def server_directory() -> Iterator[Path]:
    """A folder for a server that the test itself starts, crashes and starts again."""
    with directory_for_server() as path:
        yield path


def directory_for_server() -> AbstractContextManager[Path]:
    """A folder, gone afterwards: pytest's are closed to the account of the server of root."""
    return server_folder(memory_directory())
