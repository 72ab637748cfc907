"""A plugin of pytest for Procrastinate's own acceptance tests: their fixtures over pgqueue.

It takes the place of Procrastinate's ``tests/conftest.py``, which makes its tables and connectors.
"""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pgqueue import PgQueue

from .connectors import PsycopgConnector, SyncPsycopgConnector

TEMPLATE, DATABASE = "pgqueue_template", "procrastinate_test"
LONGEST_START = 60.0
"""Seconds that a worker process has to start."""
LONGER = 3.0
"""Seconds more than Procrastinate's one for its first jobs: the machine may be busy."""
NOT_PASSED = re.compile(r"^\| `(test_\w+\.py::\w+)` \| (.+) \|$", re.MULTILINE)


def not_passed() -> dict[str, str]:
    """The tests that do not pass, with the reason, as the README lists them."""
    return dict(NOT_PASSED.findall(Path(__file__).with_name("README.md").read_text("utf-8")))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "skip_before_version(version): of Procrastinate")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = not_passed()
    for item in items:
        file, _, name = item.nodeid.rpartition("/")[2].partition("[")[0].partition("::")
        if (reason := reasons.get(f"{file}::{name}")) is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def execute(database: str, statement: str, *names: str) -> None:
    with psycopg.connect(dbname=database, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@pytest.fixture(scope="session")
def template() -> None:
    execute("postgres", "CREATE DATABASE {}", TEMPLATE)
    queue = PgQueue(PsycopgConnector(dbname=TEMPLATE).url)
    queue.upgrade()
    queue.engine.dispose()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def connection_params(
    template: None, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """A database of its own for each test, which the environment names."""
    execute("postgres", "CREATE DATABASE {} TEMPLATE {}", DATABASE, TEMPLATE)
    monkeypatch.setenv("PGDATABASE", DATABASE)
    yield {"dbname": DATABASE}
    monkeypatch.undo()
    execute("postgres", "DROP DATABASE {} WITH (FORCE)", DATABASE)


@pytest.fixture
def psycopg_connector(connection_params: dict[str, str]) -> PsycopgConnector:
    return PsycopgConnector(dbname=connection_params["dbname"])


not_opened_psycopg_connector = psycopg_connector


@pytest.fixture
def sync_psycopg_connector(connection_params: dict[str, str]) -> SyncPsycopgConnector:
    return SyncPsycopgConnector(dbname=connection_params["dbname"])


@pytest.fixture(autouse=True)
def workers_that_serve(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a test with worker processes four seconds instead of one, counted from when they serve.

    Procrastinate's one second is for the start and the jobs together.
    """
    if request.path.name != "test_nominal.py":
        return
    request.getfixturevalue("connection_params")
    queue = PgQueue(PsycopgConnector(dbname=DATABASE).url)
    started: list[subprocess.Popen[str]] = []

    def start(*args: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(*args, **options))
        return started[-1]

    def sleep(seconds: float) -> None:
        deadline = time.monotonic() + LONGEST_START
        while time.monotonic() < deadline:
            with queue.session() as session:
                serving = len(queue.workers(session))
            if serving >= sum(process.poll() is None for process in started):
                break
            time.sleep(0.05)
        queue.engine.dispose()
        time.sleep(seconds + LONGER)

    monkeypatch.setattr(request.module, "time", SimpleNamespace(sleep=sleep, time=time.time))
    of_the_test = {**vars(subprocess), "Popen": start}
    monkeypatch.setattr(request.module, "subprocess", SimpleNamespace(**of_the_test))
