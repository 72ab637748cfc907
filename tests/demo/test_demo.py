"""The demo, as a newcomer runs it: a process that prints, kills a worker, and proves its case."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text

from pgqueue.demo.steps import BROKEN, python_files
from pgqueue.terminal import print_table

pytestmark = pytest.mark.journey

LIMIT = 300
BROKEN_ERRORS = {
    "torn_file.py.broken": "null bytes",
    "unclosed_bracket.py.broken": "was never closed",
    "wrong_encoding.py.broken": "can't decode byte",
}


def environment() -> dict[str, str]:
    # COLUMNS, which pytest sets, would cut the tables.
    others = {name: os.environ[name] for name in os.environ.keys() - {"COLUMNS"}}
    return {name: value for name, value in others.items() if not name.startswith("PGQUEUE")}


def demo(*arguments: str, module: str = "pgqueue.demo") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *module.split(), f"--limit={LIMIT}", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
    )


def assert_kept_its_promises(ended: subprocess.CompletedProcess[str]) -> None:
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    killed = re.search(r"Killed worker (\d+) with SIGKILL", ended.stdout)
    assert killed
    assert not _is_alive(int(killed.group(1)))
    assert re.search(rf"The killed worker {killed.group(1)} held [1-9]\d* jobs", ended.stdout)
    moments = re.search(
        r"([\d.]+) s after its death, all of them were claimable; two seconds are promised\.\n"
        r"  They started ([\d.]+) to ([\d.]+) s after its death",
        ended.stdout,
    )
    assert moments, ended.stdout
    claimable, first, last = map(float, moments.groups())
    assert 0 < claimable <= first <= last
    proof = re.search(r"holds: (\d+) rows in module_stats = (\d+) jobs", ended.stdout)
    assert proof
    assert proof.group(1) == proof.group(2)
    assert "holds: 0 invariant violations" in ended.stdout
    for name, words in BROKEN_ERRORS.items():
        assert re.search(rf"{name} +3  .*{words}", ended.stdout)


def test_indexes_every_file_although_a_worker_is_killed() -> None:
    ended = demo(module="pgqueue demo")

    assert_kept_its_promises(ended)


def test_on_a_given_server_makes_one_schema_and_drops_it(empty_database_url: str) -> None:
    ended = demo("--url", empty_database_url)

    assert_kept_its_promises(ended)
    assert "pgqueue_demo" in ended.stdout
    assert _schemas(create_engine(empty_database_url)) == {"information_schema", "public"}


def test_leaves_the_tables_of_an_application_alone(database_url: str) -> None:
    ended = demo("--url", database_url, "--keep")

    engine = create_engine(database_url)
    with engine.connect() as connection:
        theirs = connection.scalar(text("SELECT count(*) FROM pgqueue.jobs"))
        ours = connection.scalar(text("SELECT count(*) FROM pgqueue_demo.jobs"))
        rows = connection.scalar(text("SELECT count(*) FROM pgqueue_demo.module_stats"))
        succeeded = connection.scalar(
            text("SELECT count(*) FROM pgqueue_demo.jobs WHERE outcome = 'succeeded'")
        )
    assert ended.returncode == 0
    assert (theirs, ours) == (0, LIMIT)
    assert rows == succeeded


def test_refuses_a_schema_that_is_there_already(empty_database_url: str) -> None:
    engine = create_engine(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA pgqueue_demo"))

    ended = demo("--url", empty_database_url)

    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: ")
    assert "DROP SCHEMA pgqueue_demo CASCADE" in ended.stderr
    assert "pgqueue_demo" in _schemas(engine)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(empty_database_url: str, number: signal.Signals) -> None:
    command = [sys.executable, "-u", "-m", "pgqueue", "demo", "--url", empty_database_url]
    shown = ""
    with subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            shown += line
            if "worker processes" in line:
                break
        process.send_signal(number)
        _, errors = process.communicate(timeout=250)

    pids = re.search(r"worker processes: (.*)\.", shown)
    assert pids
    assert not any(_is_alive(int(pid)) for pid in pids.group(1).split(", "))
    # A shell says 130 to both.  CPython ends by SIGINT itself when the interrupt came while it
    # was in an exec() of a string, as in the making of a dataclass, wherever it is caught.
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in errors
    assert "pgqueue_demo" not in _schemas(create_engine(empty_database_url))


def test_ends_when_no_worker_is_left(empty_database_url: str) -> None:
    command = [sys.executable, "-u", "-m", "pgqueue", "demo", "--url", empty_database_url]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = next(filter(None, (re.search(r"processes: (.*)\.", one) for one in process.stdout)))
        for pid in pids[1].split(", "):
            os.kill(int(pid), signal.SIGKILL)
        _, errors = process.communicate(timeout=250)

    assert process.returncode == 1
    assert errors == "Error: All workers have ended by themselves.\n"


def test_the_sample_holds_the_broken_files_and_is_the_same_each_time() -> None:
    first, again = (python_files(limit=50, seed=3) for _ in range(2))
    other = python_files(limit=50, seed=4)

    assert first == again
    assert first != other
    assert len(first) == 50
    assert {Path(path).name for path in first[:3]} == set(BROKEN_ERRORS)
    assert first[:3] == [str(path) for path in BROKEN]


@pytest.mark.parametrize("columns", ["20", "60", "200"])
def test_a_table_fits_its_window(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    print_table(["file", "lines", "error"], [["a/very/long/name.py", 1234, "e" * 300]])

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= max(int(columns), 28)
    assert "1,234" in lines[1]


def _schemas(engine: Engine) -> set[str]:
    # SQLAlchemy up to 2.0.52 lists no schema whose name begins with pg: its issue 13472.
    names = text(r"SELECT nspname FROM pg_namespace WHERE nspname NOT LIKE 'pg\_%'")
    with engine.connect() as connection:
        return set(connection.scalars(names))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
