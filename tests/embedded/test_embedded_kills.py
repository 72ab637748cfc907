"""What stays of a server when one of its processes is killed, and who ends it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_probes import accepts_connections, execute, postmaster, query, wait_until
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from pgqueue.embedded import EmbeddedPostgres

pytestmark = pytest.mark.journey

STARTER = """
import json
import sys
from pathlib import Path
from pgqueue.embedded import EmbeddedPostgres

directory, port = sys.argv[1:]
server = EmbeddedPostgres(
    Path(directory) if directory else None, settings={"port": port}, durable=False
)
server.start()
print(json.dumps([server.url, str(server.directory)]), flush=True)
sys.stdin.read()
"""

Starter = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Starter]:
    """Start a server in another process, which is killed at the end."""
    processes: list[subprocess.Popen[str]] = []

    def start(directory: str = "", *, port: str = "5432") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", STARTER, directory, port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_starter_that_does_not_stop_its_server_ends_it_with_itself(start: Starter) -> None:
    process = start()
    url, folder = started_by(process)

    process.communicate()

    assert not accepts_connections(url)
    assert not folder.exists()


def test_ctrl_c_does_not_reach_the_server(start: Starter, server_directory: Path) -> None:
    process = start(str(server_directory))
    started_by(process)

    group = os.getpgid(postmaster(EmbeddedPostgres(server_directory)))

    assert group != os.getpgid(process.pid)


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_joins_the_server_of_a_killed_starter_takes_it_over(
    server_directory: Path, start: Starter, when: str
) -> None:
    process = start(str(server_directory))
    url, _ = started_by(process)
    execute(url, "CREATE TABLE kept AS SELECT 7 AS n")
    if when == "before":
        kill(process)

    with EmbeddedPostgres(server_directory, durable=False) as server:
        assert server.is_started_here == (when == "before")
        assert query(server.url, "SELECT n FROM kept") == 7
        kill(process)

    assert not accepts_connections(url)
    assert not (server_directory / "data" / "postmaster.pid").exists()


def test_the_next_temporary_server_ends_those_of_killed_starters_only(
    start: Starter, server_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(server_directory))
    monkeypatch.setattr(tempfile, "tempdir", str(server_directory))
    killed, alive = start(port="6543"), start()
    (url, folder), (url_of_alive, _) = started_by(killed), started_by(alive)
    kill(killed)
    with create_engine(url).connect() as connection, EmbeddedPostgres(durable=False):
        with pytest.raises(OperationalError):
            connection.execute(text("SELECT 1"))
        assert not folder.exists()
        assert accepts_connections(url_of_alive)

    alive.communicate()


def test_committed_rows_survive_a_killed_server(server_directory: Path) -> None:
    with EmbeddedPostgres(server_directory) as server:
        execute(server.url, "CREATE TABLE kept AS SELECT 7 AS n")

        os.kill(postmaster(server), signal.SIGKILL)
        wait_until(lambda: not accepts_connections(server.url))
        server.start()

        assert query(server.url, "SELECT n FROM kept") == 7


def test_a_start_killed_half_way_does_not_spoil_the_directory(
    server_directory: Path, start: Starter
) -> None:
    process = start(str(server_directory))
    wait_until(lambda: any(server_directory.glob("new-*/base")))
    kill(process)

    with EmbeddedPostgres(server_directory, durable=False) as server:
        assert query(server.url, "SELECT 1") == 1


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def started_by(process: subprocess.Popen[str]) -> tuple[str, Path]:
    assert process.stdout is not None
    url, folder = json.loads(process.stdout.readline())
    return url, Path(folder)
