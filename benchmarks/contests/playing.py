"""Plays the contests, and shows in figures how each queue has come through them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table
from sqlalchemy import NullPool, create_engine, make_url, text

from benchmarks.environments import ENVIRONMENTS, python_with, version_in
from chaos.broken import Broken
from chaos.workers import wait_until

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/explanation/reliability.md"
BEGIN = "<!-- written by `python -m benchmarks contests` -->\n"
END = "<!-- end -->\n"
LOOK_EVERY = 0.1

JOBS, WORKERS, KILLS = 2000, 4, 20
PATIENCE = 120.0
"""Seconds that a queue has to end its jobs after the last kill."""
MOST_STARTS = 20
"""Starts of a poison job after which the contest is over."""


@dataclass(frozen=True)
class Peer:
    """A queue, and what has to be installed for it."""

    name: str
    adapter: str
    requirements: tuple[str, ...] = ()


PEERS = (
    Peer("pgqueue", "pgqueue_.py"),
    Peer("PgQueuer", "pgqueuer_.py", ("pgqueuer[asyncpg]", "asyncpg")),
    Peer("procrastinate", "procrastinate_.py", ("procrastinate",)),
)


@dataclass
class Arena:
    """One queue in a database of its own."""

    peer: Peer
    python: Path
    url: str
    directory: Path
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            self._command(*arguments), env=self._environment(), capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self.peer.name} {arguments}: {done.stderr[-2000:]}")
        return done.stdout

    def start(self) -> subprocess.Popen[bytes]:
        with (self.directory / "log").open("ab") as log:
            worker = subprocess.Popen(
                self._command("serve"), env=self._environment(), stdout=log, stderr=log
            )
        self.workers.append(worker)
        return worker

    def end(self) -> None:
        for worker in self.workers:
            with suppress(ProcessLookupError):
                worker.kill()
            worker.wait()

    def status(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self.run("status"))
        return found

    def history(self, word: str) -> list[tuple[int, int]]:
        """(number, pid) of every such line."""
        file = self.directory / "history"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(int(n), int(pid)) for w, n, pid, _ in map(str.split, lines) if w == word]

    def _command(self, *arguments: str) -> list[str]:
        return [str(self.python), str(HERE / self.peer.adapter), *arguments]

    def _environment(self) -> dict[str, str]:
        more = {"PEER_URL": self.url, "PEER_DIRECTORY": str(self.directory)}
        return {**os.environ, **more}


def killed(arena: Arena) -> dict[str, str]:
    """Workers are killed while they work; is every job done, and how often?"""
    arena.run("enqueue", "work", str(JOBS))
    alive = [arena.start() for _ in range(WORKERS)]
    for number in range(KILLS):
        share = (number + 1) * JOBS // (KILLS + 4)
        with suppress(Broken):  # it may have stopped getting on
            _until(lambda share=share: len(arena.history("end")) >= share, 20)  # type: ignore[misc]
        victim = alive.pop(0)
        victim.kill()
        victim.wait()
        alive.append(arena.start())
    last_kill = time.monotonic()
    with suppress(Broken):
        _until(lambda: arena.status()["left"] == 0, PATIENCE)
    took = time.monotonic() - last_kill
    starts = Counter(number for number, _ in arena.history("start"))
    done = {number for number, _ in arena.history("end")}
    return {
        f"{KILLS} workers killed: jobs of {JOBS} not done": f"{JOBS - len(done)}",
        "ended after the last kill": f"{took:.0f} s" if took < PATIENCE else "not all",
        "started more than once": f"{sum(n > 1 for n in starts.values())}",
    }


def frozen(arena: Arena) -> dict[str, str]:
    """A worker is frozen in its handler, another takes over; then the first comes back."""
    arena.run("enqueue", "wait", "1")
    first = arena.start()
    _until(lambda: arena.history("start"), 30)
    os.kill(first.pid, signal.SIGSTOP)
    froze_at = time.monotonic()
    second = arena.start()
    try:
        _until(lambda: len(arena.history("start")) > 1, 60)
    except Broken:
        os.kill(first.pid, signal.SIGCONT)
        return {
            "a frozen worker's job is taken over after": "not in 60 s",
            "its late result, while another runs the job": "-",
        }
    took = time.monotonic() - froze_at
    assert arena.history("start")[1][1] == second.pid, "the other worker has taken over"
    (arena.directory / f"gate-{first.pid}").touch()
    os.kill(first.pid, signal.SIGCONT)
    _until(lambda: arena.history("end"), 30)
    ended = False
    with suppress(Broken):
        # The second is still at it: nothing may say that the job has ended.
        ended = bool(_until(lambda: arena.status()["ended"] or not arena.status()["left"], 5))
    (arena.directory / f"gate-{second.pid}").touch()
    return {
        "a frozen worker's job is taken over after": f"{took:.0f} s",
        "its late result, while another runs the job": "accepted" if ended else "refused",
    }


def poisoned(arena: Arena) -> dict[str, str]:
    """A job kills whichever worker runs it; workers are started again.  When does it end?"""
    arena.run("enqueue", "poison", "1")
    deadline = time.monotonic() + PATIENCE
    worker = arena.start()
    while time.monotonic() < deadline and len(arena.history("start")) < MOST_STARTS:
        if worker.poll() is not None:
            worker = arena.start()
        if arena.status()["left"] == 0:
            break
        time.sleep(LOOK_EVERY)
    starts = len(arena.history("start"))
    ended = arena.status()["left"] == 0
    words = "starts, then failed" if ended else "starts, and waits for the next"
    return {"a job that kills its worker, 5 attempts allowed": f"{starts} {words}"}


CONTESTS: tuple[Callable[[Arena], dict[str, str]], ...] = (killed, frozen, poisoned)


def compete(server_url: str) -> dict[str, dict[str, str]]:
    """All contests for all queues, one after the other; the figures by queue."""
    figures: dict[str, dict[str, str]] = {}
    for peer in PEERS:
        python, name = _python_of(peer)
        figures[name] = {}
        for contest in CONTESTS:
            figures[name] |= _play(contest, peer, python, server_url)
    return figures


def show(figures: dict[str, dict[str, str]]) -> None:
    table = Table("", *figures)
    for row in _rows_of(figures):
        table.add_row(*row)
    Console().print(table)


def write(figures: dict[str, dict[str, str]]) -> None:
    """Replace what an earlier run has written into the page."""
    lines = [f"| | {' | '.join(figures)} |", "|---" * (len(figures) + 1) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in _rows_of(figures)]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    new = "\n".join([f"Run of {datetime.now(UTC).date()}:", "", *lines, "", ""])
    PAGE.write_text(f"{before}{BEGIN}{new}{END}{after}")


def _rows_of(figures: dict[str, dict[str, str]]) -> list[list[str]]:
    questions = next(iter(figures.values()))
    return [[question, *(found[question] for found in figures.values())] for question in questions]


def _play(
    contest: Callable[[Arena], dict[str, str]], peer: Peer, python: Path, given_url: str
) -> dict[str, str]:
    server_url = make_url(given_url).set(drivername="postgresql+psycopg")
    url = server_url.set(database=f"contest_{os.getpid()}_{time.monotonic_ns()}")
    server = create_engine(server_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {url.database}"))
    with tempfile.TemporaryDirectory() as directory:
        plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
        arena = Arena(peer, python, plain, Path(directory))
        try:
            arena.run("setup")
            return contest(arena)
        finally:
            arena.end()
            with server.connect() as connection:
                connection.execute(text(f"DROP DATABASE {url.database} WITH (FORCE)"))


def _python_of(peer: Peer) -> tuple[Path, str]:
    """The interpreter of a queue's environment, made when it is missing, and its version."""
    if not peer.requirements:
        return Path(sys.executable), f"pgqueue {version('sqlalchemy-pgqueue')}"
    folder = ENVIRONMENTS / peer.adapter.removesuffix("_.py")
    python = python_with(["psycopg[binary]", *peer.requirements], folder=folder)
    return python, f"{peer.name} {version_in(python, peer.name)}"


def _until(condition: Callable[[], object], seconds: float) -> object:
    def look() -> object:
        time.sleep(LOOK_EVERY)
        return condition()

    return wait_until(look, seconds=seconds, what="the contest goes on")
