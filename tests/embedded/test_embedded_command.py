"""``python -m pgqueue.embedded``: a server for a project, from its first line to Ctrl-C."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from server_probes import accepts_connections

from pgqueue.embedded import EmbeddedPostgres

pytestmark = pytest.mark.journey

COMMAND = [sys.executable, "-m", "pgqueue.embedded"]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_it_says_its_url_and_runs_until_it_is_stopped(
    server_directory: Path, ending: signal.Signals
) -> None:
    directory = server_directory / "postgres"
    asked = subprocess.run(
        [*COMMAND, str(directory), "--url"], capture_output=True, text=True, check=True
    )
    assert not directory.exists()

    with subprocess.Popen([*COMMAND, str(directory)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        answered = accepts_connections(url)
        server.send_signal(ending)
        rest = server.stdout.read()

    assert asked.stdout.strip() == url
    assert answered
    assert f"{directory} keeps its data" in rest
    assert "PostgreSQL has stopped" in rest
    assert server.returncode == 0
    assert not accepts_connections(url)


def test_it_says_that_it_has_joined_a_server_which_goes_on(server_directory: Path) -> None:
    with EmbeddedPostgres(server_directory / "postgres") as first:
        joining = [*COMMAND, str(first.directory)]
        with subprocess.Popen(joining, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            said = second.stdout.readline() + second.stdout.readline()
            second.send_signal(signal.SIGINT)
            said += second.stdout.read()

        assert "runs already, and goes on" in said
        assert "has stopped" not in said
        assert accepts_connections(first.url)


def test_what_is_not_a_database_is_refused_without_a_traceback(server_directory: Path) -> None:
    (server_directory / "data").mkdir()
    (server_directory / "data" / "PG_VERSION").mkdir()

    refused = subprocess.run([*COMMAND, str(server_directory)], capture_output=True, text=True)

    assert refused.returncode == 1
    assert refused.stderr.startswith("Error: ")
    assert "Traceback" not in refused.stderr
