import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_probes import (
    accepts_connections,
    execute,
    kill_supervisor,
    postmaster,
    query,
    wait_until,
)

from pgqueue.embedded import EmbeddedPostgres

pytestmark = pytest.mark.journey

STARTER = """
import json
import sys
from pathlib import Path
from pgqueue.embedded import EmbeddedPostgres

directory = Path(sys.argv[1]) if len(sys.argv) > 1 else None
server = EmbeddedPostgres(directory, durable=False)
server.start()
print(json.dumps([server.url, str(server.directory)]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def starter() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Other processes that start a server; they are killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", STARTER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_server_and_its_folder_go_with_a_killed_starter(
    starter: Callable[..., subprocess.Popen[str]],
) -> None:
    process = starter()
    url, folder = started_by(process)
    assert accepts_connections(url)

    process.kill()

    wait_until(lambda: not folder.exists())
    assert not accepts_connections(url)


def test_a_killed_starter_leaves_a_given_directory_cleanly_shut_down(
    server_directory: Path, starter: Callable[..., subprocess.Popen[str]]
) -> None:
    process = starter(str(server_directory))
    url, _ = started_by(process)
    execute(url, "CREATE TABLE kept AS SELECT 7 AS n")

    process.kill()

    wait_until(lambda: not (server_directory / "data" / "postmaster.pid").exists())
    with EmbeddedPostgres(server_directory, durable=False) as server:
        assert query(server.url, "SELECT n FROM kept") == 7


def test_a_server_whose_supervisor_was_killed_is_joined_then_stopped(
    server_directory: Path,
) -> None:
    orphaned = EmbeddedPostgres(server_directory, durable=False)
    orphaned.start()
    pid = postmaster(orphaned)
    kill_supervisor(orphaned)

    with EmbeddedPostgres(server_directory, durable=False) as server:
        assert postmaster(server) == pid
        assert query(server.url, "SELECT 1") == 1

    assert not accepts_connections(server.url)
    assert not (server_directory / "data" / "postmaster.pid").exists()


def test_stop_ends_a_server_whose_supervisor_was_killed() -> None:
    with EmbeddedPostgres(durable=False) as server:
        folder, url = server.directory, server.url
        kill_supervisor(server)
        assert accepts_connections(url)

    assert not accepts_connections(url)
    assert not folder.exists()


def test_committed_rows_survive_a_killed_server(server_directory: Path) -> None:
    with EmbeddedPostgres(server_directory) as server:
        execute(server.url, "CREATE TABLE kept AS SELECT 7 AS n")

        os.kill(postmaster(server), signal.SIGKILL)
        wait_until(lambda: not accepts_connections(server.url))
        server.start()

        assert query(server.url, "SELECT n FROM kept") == 7


def test_committed_rows_survive_when_server_and_supervisor_are_killed(
    server_directory: Path,
) -> None:
    with EmbeddedPostgres(server_directory) as server:
        execute(server.url, "CREATE TABLE kept AS SELECT 7 AS n")

        kill_supervisor(server)
        os.kill(postmaster(server), signal.SIGKILL)
        wait_until(lambda: not accepts_connections(server.url))
        server.start()

        assert query(server.url, "SELECT n FROM kept") == 7


def test_a_start_killed_half_way_does_not_spoil_the_directory(
    server_directory: Path, starter: Callable[..., subprocess.Popen[str]]
) -> None:
    process = starter(str(server_directory))
    wait_until(lambda: any(server_directory.glob("new-*/base")))
    process.kill()
    process.wait()

    with EmbeddedPostgres(server_directory, durable=False) as server:
        assert query(server.url, "SELECT 1") == 1


def started_by(process: subprocess.Popen[str]) -> tuple[str, Path]:
    assert process.stdout is not None
    url, folder = json.loads(process.stdout.readline())
    return url, Path(folder)
