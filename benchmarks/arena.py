"""One queue in a database of its own: it is filled, worked on by real processes, and counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.peers.protocol import Starts
from benchmarks.systems import HERE, System

READY_WITHIN = 30.0
LOOK_EVERY = 0.01
PATIENCE = 300.0
GRACE = 15.0


class Spoiled(Exception):
    """The measurement is worth nothing: a job did not run, or ran twice, or a process ended."""


class Arena:
    """Use it in a ``with`` block; the database stays until the server goes."""

    def __init__(self, system: System, url: str, directory: Path) -> None:
        self.system = system
        self.url = url
        self._directory = Path(tempfile.mkdtemp(dir=directory))
        self._log = (self._directory / "log").open("ab")
        self.starts_file = self._directory / "starts"
        self.starts: Starts = Starts(self.starts_file, 1)
        self._control = self._process("serve", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.tell("setup")

    @property
    def label(self) -> str:
        return self.system.label

    def beside(self) -> Arena:
        """Another process that enqueues into the same database."""
        return Arena(self.system, self.url, self._directory.parent)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._control.stdin is not None
        self._control.stdin.close()
        try:
            self._control.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._control.kill()
            self._control.wait()
        self._log.close()

    def tell(self, command: str, **parameters: Any) -> Any:
        """Have the process that enqueues do something; returns what it answers."""
        assert self._control.stdin is not None
        assert self._control.stdout is not None
        self._control.stdin.write(json.dumps({"do": command, **parameters}).encode() + b"\n")
        self._control.stdin.flush()
        line = self._control.stdout.readline()
        answer = json.loads(line) if line else {"failed": self.log()}
        if "failed" in answer:
            raise Spoiled(f"{self.system.label}, {command}: {answer['failed'][-2000:]}")
        return answer["done"]

    def fill(self, jobs: int, *, bulk: int | None = None) -> float:
        """Make room for so many jobs, and enqueue these, or the first ``bulk`` of them.

        They are numbered from 0; returns the seconds the enqueuing took.
        """
        self.clear(jobs)
        seconds: float = self.tell("bulk", first=0, jobs=jobs if bulk is None else bulk)
        return seconds

    def clear(self, jobs: int) -> None:
        """Leave no job, and make room for so many."""
        self.tell("empty")
        self.calm()
        self.prepare_starts(jobs)

    def prepare_starts(self, jobs: int) -> None:
        """Forget what has started, and expect so many jobs."""
        self.starts = Starts(self.starts_file, jobs)

    def calm(self) -> None:
        """The same state of the server before each measurement."""
        self.sql("VACUUM ANALYZE")
        self.sql("CHECKPOINT")

    def sql(self, statement: str, *parameters: Any) -> list[Any]:
        """Plain SQL beside the queue's own connections."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def workers(self, count: int = 1) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
        """Worker processes that have begun at the same moment; stopped at the end."""
        barrier = Path(tempfile.mkdtemp(dir=self._directory))
        environment = {"BENCHMARK_BARRIER": str(barrier)}
        processes = [self._process("work", environment=environment) for _ in range(count)]
        try:
            deadline = time.monotonic() + READY_WITHIN
            while len(list(barrier.glob("ready-*"))) < count:
                self._check(processes, deadline, "get ready")
                time.sleep(LOOK_EVERY)
            (barrier / "go").touch()
            yield processes
            self._check(processes, time.monotonic() + 1, "go on")
        finally:
            _end(processes)

    def drain(self, jobs: int, *, workers: int = 1) -> float:
        """Fill, let the workers go, verify; returns jobs/s, from the first start until the
        database says that none is left."""
        self.fill(jobs)
        self.calm()
        with self.workers(workers) as processes:
            self.wait_for_starts(jobs, processes)
            self.wait_until_none_is_left(processes)
            ended = time.monotonic()
        self.verify(jobs)
        return jobs / (ended - min(self.starts.of(number)[0] for number in range(jobs)))

    def wait_for_starts(
        self, jobs: int, processes: Sequence[subprocess.Popen[bytes]], *, first: int = 0
    ) -> None:
        """Until each of so many jobs has started, from this one on."""
        deadline = time.monotonic() + PATIENCE
        number = first
        while number < first + jobs:
            if self.starts.of(number)[1]:
                number += 1
                continue
            self._check(processes, deadline, f"start job {number}")
            time.sleep(LOOK_EVERY)

    def verify(self, jobs: int) -> None:
        """Each ran once, and the database has none left."""
        wrong = [number for number in range(jobs) if self.starts.of(number)[1] != 1]
        if wrong:
            raise Spoiled(f"{self.system.label}: {len(wrong)} jobs did not run exactly once")
        left = self.tell("left")
        if left:
            raise Spoiled(f"{self.system.label}: {left} jobs are left")

    def log(self) -> str:
        """The end of what its processes have said."""
        return (self._directory / "log").read_text(errors="replace")[-2000:]

    def wait_until_none_is_left(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.tell("left"):
            self._check(processes, deadline, "finish its jobs")
            time.sleep(LOOK_EVERY)

    def _check(
        self, processes: Sequence[subprocess.Popen[bytes]], deadline: float, what: str
    ) -> None:
        if any(process.poll() is not None for process in processes):
            raise Spoiled(f"{self.system.label}: a worker has ended by itself: {self.log()}")
        if time.monotonic() > deadline:
            raise Spoiled(f"{self.system.label} did not {what} in time: {self.log()}")

    def _process(
        self, role: str, environment: dict[str, str] | None = None, **streams: Any
    ) -> subprocess.Popen[bytes]:
        variables = {
            "BENCHMARK_URL": self.url,
            "BENCHMARK_STARTS": str(self.starts_file),
            "BENCHMARK_OPTIONS": json.dumps(self.system.options),
            "BENCHMARK_ENVIRONMENT": str(self.system.environment),
        }
        return subprocess.Popen(
            self.system.command(role),
            cwd=HERE.parent,
            env={**os.environ, **variables, **(environment or {})},
            **{"stdout": self._log, "stderr": self._log, **streams},
        )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
