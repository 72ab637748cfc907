"""``--processes``: workers are replaced and stopped by their parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shop_rig import (
    PATIENCE,
    enqueue,
    running,
    running_worker,
    wait_until,
    write_shop,
)
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from pgqueue import Job, JobStatus
from pgqueue.tables import WorkerProcess

pytestmark = pytest.mark.journey


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path)


@pytest.fixture
def parent(
    shop: Path, engine: Engine, database_url: str, request: pytest.FixtureRequest
) -> Iterator[subprocess.Popen[str]]:
    options = getattr(request, "param", ["--processes", "2"])
    with running_worker(shop, database_url, *options) as process:
        wait_until(lambda: len(pids(engine)) == 2)
        yield process


def pids(engine: Engine) -> set[int]:
    with Session(engine) as session:
        return set(
            session.scalars(select(WorkerProcess.pid).where(WorkerProcess.dead_at.is_(None)))
        )


def have_ended(processes: set[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in processes)


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")


@needs_proc
def test_the_parent_has_no_connection(parent: subprocess.Popen[str], engine: Engine) -> None:
    files = Path(f"/proc/{parent.pid}/fd").iterdir()

    assert not [file for file in files if "socket" in os.readlink(file)]
    assert parent.pid not in pids(engine)


def test_a_killed_worker_is_replaced(parent: subprocess.Popen[str], engine: Engine) -> None:
    killed, other = pids(engine)
    os.kill(killed, signal.SIGKILL)

    wait_until(lambda: len(pids(engine) - {killed}) == 2)

    assert other in pids(engine)
    assert parent.stderr is not None
    line = next(line for line in parent.stderr if f"worker {killed} has ended" in line)
    assert "by signal 9; another one is started in 1 s" in line


def test_a_worker_that_a_handler_ends_with_code_2_is_replaced(
    parent: subprocess.Popen[str], shop: Path, engine: Engine
) -> None:
    """As every panic of a library in Go does; a wrong command line ends the parent at once."""
    before = pids(engine)
    enqueue(engine, shop, "exit_with", (2,))

    wait_until(lambda: len(pids(engine) - before) == 1)

    assert parent.poll() is None
    assert parent.stderr is not None
    line = next(line for line in parent.stderr if "has ended with exit code 2" in line)
    assert "another one is started in 1 s" in line


def test_sigusr1_reaches_each_worker_and_stops_none(
    parent: subprocess.Popen[str], engine: Engine
) -> None:
    workers = pids(engine)

    parent.send_signal(signal.SIGUSR1)

    assert parent.stderr is not None
    said = (line.partition("worker ")[2].partition(" (")[0] for line in parent.stderr)
    seen = set[str]()
    while seen != {str(pid) for pid in workers}:
        seen |= {next(said)} & {str(pid) for pid in workers}
    assert pids(engine) == workers
    killed = workers.pop()
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: len(pids(engine) - {killed}) == 2)  # still replaced


@needs_proc
def test_a_signal_is_forwarded_once_and_running_jobs_end(
    parent: subprocess.Popen[str], shop: Path, engine: Engine, tmp_path: Path
) -> None:
    enqueue(engine, shop, "wait_for_file", (str(tmp_path / "go"),))
    wait_until(running(engine, 1))
    workers = pids(engine)

    parent.send_signal(signal.SIGHUP)
    wait_until(lambda: len(pids(engine)) == 1)  # the idle one has ended
    (tmp_path / "go").touch()
    parent.communicate(timeout=PATIENCE)

    assert parent.returncode == 0
    assert have_ended(workers)
    with Session(engine) as session:
        assert session.scalars(select(Job)).one().status is JobStatus.SUCCEEDED


@pytest.mark.parametrize("parent", [["--processes", "2", "--grace", "600"]], indirect=True)
def test_a_second_signal_ends_the_grace_and_the_exit_code_tells(
    parent: subprocess.Popen[str], shop: Path, engine: Engine
) -> None:
    enqueue(engine, shop, "never_end", (True,))
    wait_until(running(engine, 1))

    parent.send_signal(signal.SIGTERM)
    wait_until(lambda: len(pids(engine)) == 1)
    parent.send_signal(signal.SIGTERM)
    parent.communicate(timeout=PATIENCE)

    assert parent.returncode == 3


@needs_proc
def test_the_workers_of_a_killed_parent_stop(parent: subprocess.Popen[str], engine: Engine) -> None:
    workers = pids(engine)

    parent.kill()
    parent.wait()

    wait_until(lambda: have_ended(workers))
    assert pids(engine) == set()


def test_until_empty_ends_when_all_workers_have_ended(
    shop: Path, engine: Engine, database_url: str
) -> None:
    enqueue(engine, shop, "add", *[(n, n) for n in range(20)])
    command = [sys.executable, "-m", "pgqueue", "--app", "shop:queue", "worker"]

    ended = subprocess.run(
        [*command, "--processes", "2", "--until-empty"],
        cwd=shop,
        env={**os.environ, "SHOP_DATABASE": database_url},
        timeout=PATIENCE,
    )

    assert ended.returncode == 0
    with Session(engine) as session:
        assert {job.status for job in session.scalars(select(Job))} == {JobStatus.SUCCEEDED}


def test_a_wrong_command_line_is_not_started_again(shop: Path, database_url: str) -> None:
    command = [sys.executable, "-m", "pgqueue", "--app", "shop:queue", "worker"]

    ended = subprocess.run(
        [*command, "--processes", "2", "--queues", "a b"],
        cwd=shop,
        env={**os.environ, "SHOP_DATABASE": database_url},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )

    assert ended.returncode == 2
    assert "a queue name has 1 to 64 letters" in ended.stderr
    assert "another one is started" not in ended.stderr
