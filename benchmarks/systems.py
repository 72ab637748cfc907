"""The queues that are measured, and the environment each of them runs in."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.environments import (
    ENVIRONMENTS,
    install_for_node,
    needed,
    python_in,
    python_with,
    version_in,
)

HERE = Path(__file__).parent


@dataclass(frozen=True)
class System:
    """A queue as it is measured: its adapter, and how it is set."""

    name: str
    adapter: str
    requirements: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    """What else the machine must have."""
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
            return [needed("node"), str(HERE / "peers" / self.adapter), role]
        return [str(python_in(self.environment)), str(HERE / "peers" / self.adapter), role]

    @property
    def environment(self) -> Path:
        return ENVIRONMENTS / Path(self.adapter).stem.removesuffix("_")

    def install(self) -> None:
        """Make its environment, once."""
        if self.is_here:
            return
        for program in self.programs:
            needed(program)
        if self.adapter.endswith(".mjs"):
            install_for_node(self.requirements, folder=self.environment)
        else:
            python_with(self.requirements, folder=self.environment)

    @property
    def is_installed(self) -> bool:
        return self.is_here or self.environment.exists()

    @property
    def distribution(self) -> str:
        """What the package index calls it: the first of its requirements."""
        return re.split(r"[\[=@]", self.requirements[0])[0]

    @property
    def versioned_name(self) -> str:
        """Its name with the version that is installed."""
        if self.adapter == "pgqueue_":
            return f"{self.name} {version('sqlalchemy-pgqueue')}"
        if self.is_here:
            return self.name
        if self.adapter.endswith(".mjs"):
            file = self.environment / "node_modules" / self.distribution / "package.json"
            script = f"process.stdout.write(require({str(file)!r}).version)"
            number = subprocess.check_output([needed("node"), "-e", script], text=True)
        else:
            number = version_in(python_in(self.environment), self.distribution)
        return f"{self.name} {number}"


PGQUEUE = System("pgqueue", "pgqueue_")
HANDWRITTEN = System("a loop by hand", "handwritten_")
GRAPHILE = System("graphile-worker", "graphile_.mjs", ("graphile-worker@0.17", "pg"))
PGQUEUER = System(
    "PgQueuer", "pgqueuer_.py", ("pgqueuer", "asyncpg", "psycopg[binary,pool]", "uvloop")
)
PQ = System("pq", "pq_.py", ("pq", "psycopg2-binary"))
CELERY = System("Celery", "celery_.py", ("celery[redis]==5.7.0",), programs=("redis-server",))
SERVICE = System("Flask and pgqueue", "service_pgqueue_")
SERVICE_WITH_CELERY = System(
    "Flask and Celery",
    "service_celery_.py",
    (*CELERY.requirements, "flask-sqlalchemy", "psycopg[binary]"),
    programs=CELERY.programs,
)
DBOS = System("DBOS", "dbos_.py", ("dbos==3.4.0",))
ABSURD = System("Absurd", "absurd_.py", ("absurd-sdk==0.5.1", "absurdctl==0.5.1"))
PG_BOSS = System("pg-boss", "pgboss_.mjs", ("pg-boss@12.38.0", "pg"))
PEERS = (GRAPHILE, PGQUEUER, PQ, PG_BOSS, CELERY, DBOS, ABSURD)
"""The other queues, in the order of the report."""
