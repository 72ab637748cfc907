"""Processes that fork after they have spoken to the database."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from chaos.plants import Patch, plant
from chaos.scenario import Size, scenario
from chaos.stage import Stage
from pgqueue import PgQueue


@plant
def connections_are_inherited(patch: Patch) -> None:
    """A PgQueue does not notice that it is in another process than before."""

    def engine(self):  # type: ignore[no-untyped-def]
        return self.sessions.kw["bind"]

    patch.set(PgQueue, "engine", property(engine))


@scenario(
    promises="P1",
    research="T30",
    full=Size(jobs=20, workers=20),
    short=Size(jobs=3, workers=3),
    planted={"connections_are_inherited": "speak to the same server process"},
    programs=("linux",),
)
def forks_in_the_middle(stage: Stage, size: Size) -> None:
    """fork, spawn and forkserver in the middle of work: no two processes share a connection."""
    log = stage.directory / "forking.log"
    environment = {
        "CHAOS_URL": stage.url,
        "CHAOS_DIRECTORY": str(stage.directory),
        "CHAOS_WORKER": "parent",
        "CHAOS_PLANT": stage.plant or "",
    }
    with log.open("wb") as output:
        program = subprocess.Popen(
            [sys.executable, "-m", "chaos.forking", str(size.workers), str(size.jobs)],
            env={**os.environ, **environment},
            cwd=Path(__file__).parent.parent.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        stage.until(
            lambda: _nobody_shares(stage) and program.poll() is not None, what="all processes end"
        )
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)  # and its children
            program.wait()
    stage.expect(program.returncode == 0, f"the program failed:\n{log.read_text()[-2000:]}")
    codes = json.loads((stage.directory / "codes").read_text())
    stage.expect(set(codes) == {0}, f"children ended with {codes}:\n{log.read_text()[-2000:]}")
    stage.count("forks", size.workers)
    _collect(stage)
    fleet = stage.fleet("lease", 1)  # what was enqueued after the last child was done
    stage.until_ended()
    fleet.stop()
    stage.judge()


def _nobody_shares(stage: Stage) -> bool:
    owner: dict[int, str] = {}
    for file in stage.directory.glob("backends-*"):
        for line in file.read_text().splitlines():
            [backend] = json.loads(line)
            first = owner.setdefault(backend, file.name)
            words = f"{first} and {file.name} speak to the same server process {backend}"
            stage.expect(first == file.name, words)
    return True


def _collect(stage: Stage) -> None:
    for file in stage.directory.glob("acknowledged-*"):
        for line in file.read_text().splitlines():
            stage.acknowledged.update(json.loads(line))
    stage.count("jobs", len(stage.acknowledged))
