"""The command line in a terminal, a pipe and a hurry: as a person has it."""

import os
import pty
import re
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSCTTY, TIOCSWINSZ

import pytest
from shop_rig import PATIENCE, assert_one_line, environment, pgqueue, wait_until, write_shop
from sqlalchemy import Engine, func, text
from sqlalchemy import select as select_rows
from sqlalchemy.orm import Session

from pgqueue import Job, JobStatus, PgQueue

pytestmark = pytest.mark.journey

STYLE = re.compile(r"\x1b\[[0-9;]*m")
COMMAND = [sys.executable, "-m", "pgqueue"]


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path)


@pytest.fixture
def jobs(engine: Engine) -> list[int]:
    """More jobs than a pipe holds, that wait."""
    queue = PgQueue(engine)

    @queue.task(name="a.task.with_a_name_that_is_longer_than_most_windows_are_wide")
    def task(a: int) -> None: ...

    with queue.session() as session, session.begin():
        return task.enqueue_many(session, [(n,) for n in range(3000)])


class Terminal:
    """A terminal with a command in it."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self._master = master
        self.process = process
        self.screen = ""

    def read_until(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while words not in self.screen:
            assert self._read(deadline), f"the command ended before {words!r}: {self.screen}"

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read_to_end(self) -> int:
        deadline = time.monotonic() + PATIENCE
        while self._read(deadline):
            pass
        return self.process.wait(PATIENCE)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(deadline - time.monotonic(), 0))
        assert ready, f"nothing more came: {self.screen}"
        try:
            read = os.read(self._master, 65536)
        except OSError:  # what Linux says when the other side is closed
            return False
        self.screen += read.decode("utf-8", "replace")
        return bool(read)


@contextmanager
def terminal(
    shop: Path, *arguments: str, columns: int = 100, **variables: str
) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    ioctl(slave, TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=shop,
        env=environment(None) | {"TERM": "xterm-256color"} | variables,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: ioctl(0, TIOCSCTTY, 0),  # so that Ctrl-C reaches it as a signal
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def without_style(screen: str) -> list[str]:
    return STYLE.sub("", screen).splitlines()


def pending(engine: Engine) -> int:
    with Session(engine) as session:
        count = select_rows(func.count()).where(Job.status == JobStatus.PENDING)
        return session.scalars(count).one()


class TestTerminal:
    def test_a_table_has_a_bold_heading_and_fits_a_narrow_window(
        self, shop: Path, jobs: list[int], database_url: str
    ) -> None:
        with terminal(shop, "--url", database_url, "jobs", columns=60) as window:
            assert window.read_to_end() == 0

        assert "\x1b[1m" in window.screen
        lines = without_style(window.screen)
        assert len(lines) == 22  # the heading, twenty jobs, and where the older ones are
        assert max(len(line) for line in lines) <= 60
        assert "..." in lines[1]

    @pytest.mark.parametrize(("answer", "left"), [("y", 0), ("n", 3000)])
    def test_many_jobs_are_changed_when_the_answer_is_yes(
        self, shop: Path, jobs: list[int], engine: Engine, database_url: str, answer: str, left: int
    ) -> None:
        arguments = ("--url", database_url, "cancel", "--status", "pending")
        with terminal(shop, *arguments) as window:
            window.read_until("Cancel 3,000 pending jobs? [y/N]")
            window.type(f"{answer}\n")
            code = window.read_to_end()

        assert code == (0 if answer == "y" else 1)
        assert pending(engine) == left
        assert ("3,000 cancelled" in window.screen) is (answer == "y")

    def test_ctrl_c_ends_with_130_and_keeps_what_is_committed(
        self, shop: Path, jobs: list[int], engine: Engine, database_url: str
    ) -> None:
        # Somebody else holds one of the jobs: the command ends the others, and waits for this one.
        with Session(engine) as session:
            session.execute(text(f"SELECT FROM pgqueue.jobs WHERE id = {jobs[-1]} FOR UPDATE"))
            arguments = ("--url", database_url, "cancel", "--status", "pending", "--yes")
            with terminal(shop, *arguments) as window:
                wait_until(lambda: pending(engine) == 1)
                window.type("\x03")
                code = window.read_to_end()

        assert code == 130
        assert "Traceback" not in window.screen
        assert "2,999 cancelled" in window.screen
        assert pending(engine) == 1


class TestPipe:
    def test_a_reader_that_stops_early_is_no_error(
        self, shop: Path, jobs: list[int], database_url: str
    ) -> None:
        command = [*COMMAND, "--url", database_url, "jobs", "--limit", "3000"]
        with subprocess.Popen(
            command, cwd=shop, env=environment(None), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stderr is not None
            heading = process.stdout.readline()
            process.stdout.close()
            words = process.stderr.read()

        assert heading.startswith("id")
        assert words == ""

    def test_plain_lines_have_no_style_and_full_names(
        self, shop: Path, jobs: list[int], database_url: str
    ) -> None:
        ended = pgqueue(shop, "--url", database_url, "jobs")

        assert "\x1b" not in ended.stdout
        assert "a.task.with_a_name_that_is_longer_than_most_windows_are_wide" in ended.stdout


class TestSecrets:
    def test_a_password_in_the_error_of_an_app_is_not_printed(self, shop: Path) -> None:
        (shop / "leaky.py").write_text(
            "url = 'postgresql://me:sekret@host/db'\nraise ValueError(f'cannot use {url}')\n"
        )

        ended = pgqueue(shop, "--app", "leaky:queue", "status")

        assert_one_line(ended, "ValueError: cannot use postgresql://me:***@host/db", "leaky.py:2")


class TestOutput:
    def test_what_an_app_prints_does_not_disturb_the_json(
        self, shop: Path, database_url: str
    ) -> None:
        ended = pgqueue(
            shop, "--app", "chatty:queue", "status", "--json", database_url=database_url
        )

        assert ended.stdout.startswith("{")
        assert ended.stderr == "hello\n"


class TestCompletion:
    @pytest.mark.parametrize(
        ("line", "offered"),
        [
            ("pgqueue re", {"requeue", "restart", "resume", "revision", "revoke"}),
            ("pgqueue jobs ", {"list", "show"}),
            ("pgqueue jobs --status f", {"failed"}),
            ("pgqueue --app chatty:queue requeue --task shop.a", {"shop.add"}),
            ("pgqueue cancel --app chatty:queue --queue ", {"default", "mail"}),
            ("pgqueue --app exploding:queue requeue --task ", set()),
        ],
    )
    def test_completion_offers_names_and_prints_nothing_else(
        self, shop: Path, line: str, offered: set[str]
    ) -> None:
        words = line.split()
        last = len(words) if line.endswith(" ") else len(words) - 1
        asked = {"_PGQUEUE_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(last)}

        ended = subprocess.run(
            [Path(sys.executable).with_name("pgqueue")],
            cwd=shop, env=environment("postgresql://nobody@127.0.0.1:1/nowhere") | asked,
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip

        answers = ended.stdout.split()
        assert {answer.partition(",")[2] for answer in answers} == offered
        assert ended.stderr == ""
