"""A scenario: what is done to a queue, in two sizes, and the bug it has to catch."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chaos.environment import Environment


@dataclass(frozen=True, slots=True)
class Size:
    """How large a run is; what each number counts is said by the scenario that reads it."""

    jobs: int = 0
    workers: int = 0
    faults: int = 0
    seconds: float = 0.0


class Server(Enum):
    """Which server a scenario runs on."""

    ANY = "any"
    """It does nothing to the server: the tests give it a database of theirs."""
    OWN = "own"
    """It crashes, restarts or reconfigures its server."""


@dataclass(frozen=True)
class Scenario:
    """One way to be unkind, registered by :func:`scenario`."""

    name: str
    title: str
    run: Callable[[Environment, Size], None]
    promises: str
    full: Size
    short: Size
    long: Size | None
    """Where a fault goes on for a minute or more; the battery has no time for it."""
    mutated: dict[str, str]
    """The bugs that must turn it red, each with a pattern that the verdict has to match, so that
    a bug which merely fails is not taken for one that is caught.  They stand beside the scenario,
    marked by ``@mutation``."""
    server: Server
    settings: dict[str, str]
    """Settings of its own server."""
    programs: tuple[str, ...]
    """What has to be installed; without it the scenario is left out, and the report says so."""
    alone: bool
    """It keeps both cores busy: nothing else may run beside it."""
    in_battery: bool

    def size(self, name: str) -> Size:
        """Its size of this name; the full one, where there is no long one."""
        sizes = {"short": self.short, "full": self.full, "long": self.long or self.full}
        return sizes[name]

    def missing(self) -> list[str]:
        """What this machine lacks for it."""
        return [program for program in self.programs if not _has(program)]


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *,
    promises: str,
    full: Size,
    short: Size,
    mutated: dict[str, str],
    long: Size | None = None,
    server: Server = Server.ANY,
    settings: dict[str, str] | None = None,
    programs: tuple[str, ...] = (),
    alone: bool = False,
    in_battery: bool = True,
) -> Callable[[Callable[[Environment, Size], None]], Callable[[Environment, Size], None]]:
    """Register a scenario; its name is that of the function, its title the docstring."""

    def register(run: Callable[[Environment, Size], None]) -> Callable[[Environment, Size], None]:
        name = run.__name__
        assert name not in SCENARIOS, f"there are two scenarios named {name}"
        SCENARIOS[name] = Scenario(
            name=name,
            title=(run.__doc__ or "").strip().splitlines()[0],
            run=run,
            promises=promises,
            full=full,
            short=short,
            long=long,
            mutated=mutated,
            server=server,
            settings=settings or {},
            programs=programs,
            alone=alone,
            in_battery=in_battery,
        )
        return run

    return register


def load() -> dict[str, Scenario]:
    """All scenarios."""
    import chaos.scenarios  # noqa: F401 - they register themselves

    return SCENARIOS


def _has(program: str) -> bool:
    checks: dict[str, Callable[[], Any]] = {
        "linux": lambda: sys.platform == "linux",
        "root": _is_root,
    }
    return bool(checks.get(program, lambda: shutil.which(program, path=_PATH))())


_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _is_root() -> bool:
    import os

    return os.geteuid() == 0
