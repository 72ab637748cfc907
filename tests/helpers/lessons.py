"""Lessons: documents whose reader makes a project, file by file and command by command.

Console blocks with a prompt are run, in one shell; the lines after a command that have no prompt
are lines of its output, in that order, and ``...`` stands for anything.  A comment directly above
a block may say otherwise:

``<!-- file: shop.py -->`` writes the block to that file, ``<!-- adds to: shop.py -->`` adds it
with two empty lines between; ``<!-- a terminal of its own -->`` runs the block in a new shell,
whose last command goes on until the lesson ends; ``<!-- soon -->`` repeats it until it says what
is printed; ``<!-- not run: reason -->`` leaves it out.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REMARK = re.compile(r"<!-- (.+) -->\n+\Z")
PROMPT = "$ "
PORTS = ("5000", "9187")
"""Of `flask run` and of a worker's metrics; a test takes free ones in their place."""

PATIENCE = 250.0
LOOK_EVERY = 0.05


@dataclass(frozen=True)
class Step:
    """One block of a lesson."""

    line: int
    remark: str
    text: str

    @property
    def commands(self) -> str:
        lines = self.text.splitlines()
        return "\n".join(line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT))

    @property
    def output(self) -> list[str]:
        lines = self.text.splitlines()
        return [line for line in lines if not line.startswith(PROMPT) and line != "..."]


def steps_of(document: Path) -> Iterator[Step]:
    """What a reader of the document does, in its order."""
    text = document.read_text("utf-8")
    for block in FENCE.finditer(text):
        found = REMARK.search(text[: block.start()])
        remark = found[1] if found else ""
        is_done = block[1] == "console" or remark.startswith(("file: ", "adds to: "))
        if is_done and not remark.startswith("not run: "):
            yield Step(text.count("\n", 0, block.start(1)) + 1, remark, block[2])


def is_said(expected: list[str], said: str) -> bool:
    """Whether these lines are among what was said, in that order."""
    left = iter(said.splitlines())
    patterns = [".*".join(re.escape(part) for part in line.split("...")) for line in expected]
    return all(any(re.fullmatch(pattern, line) for line in left) for pattern in patterns)


class Terminal:
    """A shell of the reader whose last command goes on."""

    def __init__(self, step: Step, commands: str, directory: Path, output: Path) -> None:
        self.step = step
        self._output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                ["bash", "-ec", commands],
                cwd=directory,
                env=plain_environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_heed_ctrl_c,
            )

    @property
    def said(self) -> str:
        return self._output.read_text("utf-8")

    def wait_until_it_says(self, expected: list[str]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_said(expected, self.said):
            assert self.is_running, f"line {self.step.line} has ended:\n{self.said}"
            assert time.monotonic() < deadline, f"line {self.step.line} says only:\n{self.said}"
            time.sleep(LOOK_EVERY)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def press_ctrl_c(self) -> None:
        """As in a terminal, it reaches every program there."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        self._process.wait(PATIENCE)


class Reader:
    """Does what a lesson says, in a directory; ends every terminal at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.terminals: list[Terminal] = []
        self._environment = plain_environment()
        self._ports = {port: _free_port() for port in PORTS}
        # The environment that its reader makes and activates, in the block that is not run, is
        # the one the tests run in.
        (directory / ".venv").symlink_to(sys.prefix)
        self._environment["PATH"] = f"{directory / '.venv' / 'bin'}:{os.environ['PATH']}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        for terminal in reversed(self.terminals):
            terminal.press_ctrl_c()
        return False

    def do(self, step: Step) -> None:
        match step.remark.split(": ", maxsplit=1):
            case ["file", name]:
                (self.directory / name).write_text(step.text, "utf-8")
            case ["adds to", name]:
                path = self.directory / name
                path.write_text(f"{path.read_text('utf-8')}\n\n{step.text}", "utf-8")
            case ["a terminal of its own"]:
                self._open_terminal(step)
            case ["soon"]:
                self._repeat(step)
            case [""]:
                said = self._run(step)
                assert is_said(step.output, said), f"line {step.line} says:\n{said}"
            case _:
                raise AssertionError(f"line {step.line}: what does {step.remark!r} mean?")

    def _open_terminal(self, step: Step) -> None:
        number = len(self.terminals)
        output = self.directory / f".terminal-{number}"
        terminal = Terminal(step, self._on_own_ports(step.commands), self.directory, output)
        self.terminals.append(terminal)
        terminal.wait_until_it_says([self._on_own_ports(line) for line in step.output])

    def _repeat(self, step: Step) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_said(step.output, said := self._run(step)):
            assert time.monotonic() < deadline, f"line {step.line} says only:\n{said}"
            time.sleep(LOOK_EVERY)

    def _run(self, step: Step) -> str:
        """Run the commands of one block; what they export is there for the next."""
        state = self.directory / ".environment"
        done = subprocess.run(
            ["bash", "-ec", f"{self._on_own_ports(step.commands)}\nenv -0 > {state}"],
            cwd=self.directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"line {step.line} failed:\n{done.stdout}"
        pairs = (line.partition("=") for line in state.read_text().split("\0") if line)
        self._environment = {name: value for name, _, value in pairs}
        return done.stdout

    def _on_own_ports(self, text: str) -> str:
        for port, own in self._ports.items():
            text = text.replace(port, own)
        return text


def plain_environment() -> dict[str, str]:
    """A reader's: nothing in it names a database or an application."""
    prefixes = ("PGQUEUE_", "FLASK_", "DATABASE_URL")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(prefixes)},
        "PYTHONUNBUFFERED": "1",
    }


def _heed_ctrl_c() -> None:
    """In a terminal nobody ignores it, as a job of a shell in the background does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
