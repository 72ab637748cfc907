"""Worker processes: started, killed, frozen, stopped, and started again."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeVar

from sqlalchemy import make_url

from chaos import worker
from chaos.broken import Broken

T = TypeVar("T")

FORKS = multiprocessing.get_context("forkserver")
"""Workers are forked from a process that has imported everything and connected to nothing."""
FORKS.set_forkserver_preload(
    # The installed ones by name: before Python 3.13 it finds no others from another directory.
    [
        "pgqueue.public",
        "pgqueue.cli.working",
        "sqlalchemy.dialects.postgresql.psycopg",
        "sqlalchemy.ext.asyncio",
        "chaos.worker",
        "chaos.scenarios",
    ]
)

PATIENCE = 60.0
LOOK_EVERY = 0.005
LOOK_AT_LEAST_EVERY = 0.1
LEAVE = 4
"""Times as long as a look has taken, to wait until the next."""


def wait_until(condition: Callable[[], T], *, seconds: float = PATIENCE, what: str = "") -> T:
    """Look until it is so; what it returned then."""
    began = time.monotonic()
    while True:
        looked_at = time.monotonic()
        if found := condition():
            return found
        now = time.monotonic()
        if now - began > seconds:
            raise Broken(f"not within {seconds:g} s: {what or condition}")
        time.sleep(max(rest(now - began), LEAVE * (now - looked_at)))


def rest(waited: float) -> float:
    """Seconds until the next look, after so many that one has waited.

    A twentieth of them: who looks must not keep those from the processor who are looked at.
    """
    return min(max(waited / 20, LOOK_EVERY), LOOK_AT_LEAST_EVERY)


class Run(Protocol):
    """What workers read of their environment, and write into it."""

    url: str
    directory: Path
    mutation: str | None
    dice: Random
    members: list[Member]

    def next_name(self) -> str: ...
    def count(self, what: str, times: int = 1) -> None: ...
    def rows(self, statement: str) -> list[Any]: ...
    def until(self, condition: Callable[[], T], *, seconds: float, what: str) -> T: ...


class Member:
    """One worker process."""

    def __init__(self, run: Run, name: str, url: str, options: dict[str, Any]) -> None:
        self.name = name
        self.log = run.directory / f"{name}.log"
        self.log.touch()
        self.was_harmed = False
        """Whether it was killed, frozen or cut off: its jobs may start twice."""
        own_url = make_url(url).update_query_dict({"application_name": name})
        self.variables = {
            "CHAOS_URL": own_url.render_as_string(hide_password=False),
            "CHAOS_DIRECTORY": str(run.directory),
            "CHAOS_WORKER": name,
            "CHAOS_PLANT": run.mutation or "",
        }
        self._options = options
        self._start()

    def _start(self) -> None:
        self._process = FORKS.Process(
            target=worker.run, args=(self.variables, self.log, dict(self._options)), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None, "it was started"
        return pid

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def _code(self) -> int | None:
        """None while it runs; a signal is a negative number."""
        return self._process.exitcode

    def send(self, number: signal.Signals) -> None:
        # It may end by itself between the look and the signal.
        with suppress(ProcessLookupError):
            if self.is_running:
                os.kill(self.pid, number)

    def freeze(self) -> None:
        """SIGSTOP; returns when every thread of it stands still."""
        self.was_harmed = True
        self.send(signal.SIGSTOP)
        wait_until(lambda: is_stopped(self.pid), what=f"{self.name} has stopped")

    @property
    def stands_still(self) -> bool:
        return self.is_running and is_stopped(self.pid)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9; returns when the process is gone."""
        self.was_harmed = True
        self.send(signal.SIGKILL)
        self.exit_code()

    def exit_code(self, *, seconds: float = PATIENCE) -> int:
        """Wait for its end; a signal is a negative number."""
        wait_until(lambda: not self.is_running, seconds=seconds, what=f"{self.name} ends")
        code = self._code()
        assert code is not None, "it has ended"
        return code

    def terminate(self, *, seconds: float = PATIENCE) -> int:
        """SIGTERM; returns the exit code."""
        self.send(signal.SIGTERM)
        return self.exit_code(seconds=seconds)


class Program(Member):
    """A worker in a process that was started, not forked: slower, and with a start of its own."""

    def __init__(
        self,
        run: Run,
        name: str,
        url: str,
        options: dict[str, Any],
        *,
        before: tuple[str, ...],
    ) -> None:
        self._before = before
        super().__init__(run, name, url, options)

    def _start(self) -> None:
        command = [*self._before, sys.executable, "-m", "chaos.worker", str(self.log)]
        self._popen = subprocess.Popen(
            [*command, json.dumps(self._options)],
            # A crash of the interpreter leaves the stacks of all threads in the log.
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **self.variables},
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.DEVNULL,
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def _code(self) -> int | None:
        return self._popen.poll()


class Workers:
    """The worker processes of one scenario."""

    def __init__(self, run: Run, count: int, **options: Any) -> None:
        self._run = run
        self.options = {"concurrency": 4, "poll_interval": 0.2, "grace": 10, **options}
        self.members: list[Member] = []
        for _ in range(count):
            self.add()

    def add(self, *, url: str | None = None, **options: Any) -> Member:
        """Start one more."""
        member = Member(
            self._run,
            self._run.next_name(),
            url or self._run.url,
            {**self.options, **options},
        )
        return self._take(member)

    def add_program(self, *before: str) -> Member:
        """Start one more in a process of its own, with these words before its command."""
        run = self._run
        return self._take(Program(run, run.next_name(), run.url, self.options, before=before))

    def add_with_clock(self, kind: str, offset: str) -> Member:
        """Start one more whose clock is wrong: all of a kind have one, a file that may change."""
        clock = self._run.directory / f"clock-{kind}"
        if not clock.exists():  # or another worker would find it empty for a moment
            clock.write_text(offset)
        return self.add_program(sys.executable, "-m", "chaos.wrong_clock", str(clock))

    def _take(self, member: Member) -> Member:
        self.members.append(member)
        self._run.members.append(member)
        return member

    def until_registered(self, *, seconds: float = PATIENCE) -> None:
        """Wait until the database knows all of them."""
        names = {member.pid for member in self.members}
        alive = "SELECT pid FROM pgqueue.workers WHERE dead_at IS NULL"
        self._run.until(
            lambda: names <= {row[0] for row in self._run.rows(alive)},
            seconds=seconds,
            what="all workers are registered",
        )

    def some(self) -> Member:
        """One of them, by the seed."""
        return self._run.dice.choice(self.members)

    def kill(self, member: Member) -> None:
        """kill -9, counted."""
        member.kill()
        self.members.remove(member)
        self._run.count("kills")

    def kill_one(self) -> None:
        """kill -9 of one of them, by the seed; another starts in its place."""
        self.kill(self.some())
        self.add()

    def replace_ended(self) -> int:
        """What a supervisor does: start another for each that has ended; how many had."""
        ended = [member for member in self.members if not member.is_running]
        for member in ended:
            member.was_harmed = True
            self.members.remove(member)
            self.add()
        return len(ended)

    def stop(self, *, seconds: float = PATIENCE) -> None:
        """SIGTERM to all, and each has to end well."""
        for member in self.members:
            member.send(signal.SIGTERM)
        for member in self.members:
            code = member.exit_code(seconds=seconds)
            was_young = code == -signal.SIGTERM and "serving" not in member.log.read_text()
            if code != 0 and not was_young:
                raise Broken(f"{member.name} was stopped and ended with {code}")
        self.members.clear()


def is_stopped(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task")
    if threads.is_dir():
        try:
            stats = [file.read_text() for file in threads.glob("*/stat")]
        except (ProcessLookupError, FileNotFoundError):  # a thread has just ended
            return False
        states = [stat.rpartition(")")[2].split()[0] for stat in stats]
    else:  # not Linux: the process as a whole
        command = ["ps", "-o", "state=", "-p", str(pid)]
        states = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return {state[0] for state in states} == {"T"}
