"""The queues that are measured, and the environment each of them runs in."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".peers"


class NotInstalled(Exception):
    """It cannot be measured on this machine; says what is missing."""


@dataclass(frozen=True)
class System:
    """A queue as it is measured: its adapter, and how it is set."""

    name: str
    adapter: str
    requirements: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    setting: str = ""
    """In words, for the tables."""

    @property
    def label(self) -> str:
        return f"{self.name}, {self.setting}" if self.setting else self.name

    @property
    def is_here(self) -> bool:
        """Whether it runs in our own environment."""
        return not self.requirements

    def given(self, setting: str, **options: Any) -> System:
        """The same queue, set otherwise."""
        return replace(self, setting=setting, options={**self.options, **options})

    def command(self, role: str) -> list[str]:
        if self.is_here:
            return [sys.executable, "-m", f"benchmarks.peers.{self.adapter}", role]
        if self.adapter.endswith(".mjs"):
            return [_needed("node"), str(HERE / "peers" / self.adapter), role]
        return [str(self.environment / "bin/python"), str(HERE / "peers" / self.adapter), role]

    @property
    def environment(self) -> Path:
        return ENVIRONMENTS / Path(self.adapter).stem.removesuffix("_")

    def install(self) -> None:
        """Make its environment, once."""
        if self.is_here or (self.environment / ".installed").exists():
            return
        self.environment.mkdir(parents=True, exist_ok=True)
        try:
            if self.adapter.endswith(".mjs"):
                install = [_needed("npm"), "install", "--silent", "--no-fund", *self.requirements]
            else:
                venv.create(self.environment, with_pip=True)
                python = str(self.environment / "bin/python")
                install = [python, "-m", "pip", "install", "--quiet", *self.requirements]
            subprocess.run(install, cwd=self.environment, check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            said = (error.stderr or error.stdout).decode(errors="replace").strip()
            raise NotInstalled(f"{self.name}: {said[-300:]}") from error
        (self.environment / ".installed").touch()

    @property
    def versioned_name(self) -> str:
        """Its name with the version that is installed."""
        if self.adapter == "pgqueue_":
            return f"{self.name} {version('sqlalchemy-pgqueue')}"
        if self.is_here:
            return self.name
        if self.adapter.endswith(".mjs"):
            file = self.environment / "node_modules" / self.name / "package.json"
            script = f"process.stdout.write(require({str(file)!r}).version)"
            number = subprocess.check_output([_needed("node"), "-e", script], text=True)
        else:
            script = (
                f"from importlib.metadata import version; print(version({self.name.lower()!r}))"
            )
            python = str(self.environment / "bin/python")
            number = subprocess.check_output([python, "-c", script], text=True)
        return f"{self.name} {number.strip()}"


def _needed(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise NotInstalled(f"{program} is not installed")
    return found


PGQUEUE = System("pgqueue", "pgqueue_")
HANDWRITTEN = System("a loop by hand", "handwritten_")
GRAPHILE = System("graphile-worker", "graphile_.mjs", ("graphile-worker@0.17", "pg"))
PGQUEUER = System(
    "PgQueuer", "pgqueuer_.py", ("pgqueuer", "asyncpg", "psycopg[binary,pool]", "uvloop")
)
PQ = System("pq", "pq_.py", ("pq", "psycopg2-binary"))
