"""``Worker.activity()`` and SIGUSR1: what each slot and thread of a worker is doing."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from worker_rig import PATIENCE, running, wait_until

from pgqueue import PgQueue, Worker


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def test_it_names_the_job_of_each_slot_with_its_innermost_calls(queue: PgQueue) -> None:
    began, may_end = [Event(), Event(), Event()], Event()

    def in_a_helper(number: int) -> None:
        began[number].set()
        may_end.wait(PATIENCE)

    async def on_the_loop(number: int) -> None:
        began[number].set()
        while not may_end.is_set():
            await asyncio.sleep(0.01)

    @queue.task(name="plain", timeout=timedelta(hours=1))
    def plain() -> None:
        in_a_helper(0)

    @queue.task(name="transactional")
    def transactional(session: Session) -> None:
        in_a_helper(1)

    @queue.task(name="on_loop")
    async def on_loop() -> None:
        await on_the_loop(2)

    jobs = {task.name: task.delay().id for task in (plain, transactional, on_loop)}
    worker = Worker(queue, concurrency=4)
    assert worker.activity() == ""
    with running(worker):
        assert all(one.wait(PATIENCE) for one in began)
        words = worker.activity()
        may_end.set()

    first, *rest = words.splitlines()
    assert first.startswith(f"worker {os.getpid()} (")
    assert "3 of 4 slots are busy; 3 jobs are claimed and not settled; last heartbeat" in first
    slots = re.split(r"^(?=slot |thread )", "\n".join(rest), flags=re.MULTILINE)
    of_job = {
        name: next(one for one in slots if f": job {job} " in one) for name, job in jobs.items()
    }
    assert re.match(r"slot \d: job \d+ plain, attempt 1, for \d+\.\d s, 3\d\d\d", of_job["plain"])
    assert " s until its timeout\n" in of_job["plain"]
    assert re.search(r"in plain\n.*\n.*in in_a_helper\n", of_job["plain"])
    assert re.search(r"in transactional\n.*\n.*in in_a_helper\n", of_job["transactional"])
    assert re.search(r"in on_loop\n.*\n.*in on_the_loop\n", of_job["on_loop"])
    assert sum(one.rstrip().endswith(": free") for one in slots) == 1
    threads = {one.partition("\n")[0] for one in slots if one.startswith("thread ")}
    assert {f"thread pgqueue-{one}" for one in ("heartbeat", "claimer", "settler")} <= threads


PROGRAM = """
    import logging, os, sys
    from pathlib import Path
    from time import sleep
    from pgqueue import PgQueue, Worker

    logging.basicConfig()
    queue = PgQueue(sys.argv[1])

    def until_told():
        Path("pid").write_text(str(os.getpid()))
        while not Path("end").exists():
            sleep(0.01)

    @queue.task(executor="process")
    def in_child():
        until_told()

    {more}
    in_child.delay()
    Worker(queue, concurrency=1, max_jobs=1).run()
"""


def start(url: str, directory: Path, more: str = "") -> tuple[subprocess.Popen[bytes], Path]:
    program, log = directory / "program.py", directory / "log"
    program.write_text(textwrap.dedent(PROGRAM).format(more=more), "utf-8")
    with log.open("wb") as stderr:
        worker = subprocess.Popen([sys.executable, program, url], cwd=directory, stderr=stderr)
    wait_until(lambda: (directory / "pid").exists() and (directory / "pid").read_text())
    return worker, log


@pytest.mark.journey
def test_sigusr1_logs_it_and_child_processes_write_their_stacks(
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    worker, log = start(database_url, tmp_path)

    worker.send_signal(signal.SIGUSR1)
    wait_until(lambda: "in until_told" in log.read_text())
    words = log.read_text()
    (tmp_path / "end").touch()

    assert worker.wait(PATIENCE) == 0
    child = (tmp_path / "pid").read_text()
    assert f"WARNING:pgqueue.worker.supervisor:worker {worker.pid} (" in words
    assert re.search(
        rf"slot 1: job 1 \S+in_child, attempt 1, for .* s, in process {child}\n", words
    )
    assert re.search(r'File ".*program.py", line \d+ in until_told\n.* in in_child\n', words)


@pytest.mark.journey
def test_a_handler_of_the_application_for_sigusr1_stays(
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    more = "import signal; signal.signal(signal.SIGUSR1, lambda *_: Path('end').touch())"
    worker, log = start(database_url, tmp_path, more)

    worker.send_signal(signal.SIGUSR1)

    assert worker.wait(PATIENCE) == 0
    assert "slot 1" not in log.read_text()
