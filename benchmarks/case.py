"""A case: one row of the table of goals, and what a run of it has shown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import psycopg

from benchmarks.arena import Arena
from benchmarks.environments import NotInstalled
from benchmarks.systems import System


@dataclass(frozen=True)
class Series:
    """What was measured of one thing, turn by turn."""

    name: str
    values: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Goal:
    """What a figure is held to; without a bound it is only told."""

    what: str
    values: tuple[float, ...]
    at_least: float | None = None
    at_most: float | None = None
    unit: str = "x"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool:
        low = self.at_least is None or self.median >= self.at_least
        return low and (self.at_most is None or self.median <= self.at_most)


@dataclass
class Finding:
    """What a case has shown."""

    series: list[Series] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, name: str, values: list[float], unit: str) -> Series:
        one = Series(name, tuple(values), unit)
        self.series.append(one)
        return one

    def ratio(
        self,
        ours: Series,
        theirs: Series,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Turn by turn, because a machine drifts between turns and less within one."""
        ratios = tuple(a / b for a, b in zip(ours.values, theirs.values, strict=True))
        self.goals.append(Goal(f"{ours.name} / {theirs.name}", ratios, at_least, at_most))

    def bound(self, one: Series, *, at_most: float) -> None:
        self.goals.append(Goal(one.name, one.values, at_most=at_most, unit=one.unit))


@dataclass(frozen=True)
class Size:
    """How large a run is; what a number counts is said by the case that reads it."""

    jobs: int = 0
    turns: int = 1
    rows: int = 0
    clients: int = 8


@dataclass(frozen=True)
class Case:
    name: str
    title: str
    run: Callable[[Bench, Size], Finding]
    smoke: Size
    usual: Size
    full: Size

    def size(self, name: str, turns: int | None = None) -> Size:
        found: Size = getattr(self, name)
        return found if turns is None else replace(found, turns=turns)


CASES: dict[str, Case] = {}


def case(
    *, smoke: Size, usual: Size, full: Size | None = None
) -> Callable[[Callable[[Bench, Size], Finding]], Callable[[Bench, Size], Finding]]:
    """Register a case; its name is that of the function, its title the docstring.

    ``smoke`` shows that it runs, ``usual`` is for ten minutes in all, ``full`` has the sizes of
    the goals.
    """

    def register(run: Callable[[Bench, Size], Finding]) -> Callable[[Bench, Size], Finding]:
        title = " ".join((run.__doc__ or "").split("\n\n")[0].split())
        CASES[run.__name__] = Case(run.__name__, title, run, smoke, usual, full or usual)
        return run

    return register


@dataclass
class Bench:
    """The server, and what is installed to be compared with."""

    url: str
    directory: Path
    with_peers: bool
    missing: list[str] = field(default_factory=list)
    _databases: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Drop what was made."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            for name in self._databases:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def arena(self, system: System) -> Arena:
        """The system in a new database; close it."""
        name = f"benchmark_{uuid4().hex[:12]}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        self._databases.append(name)
        return Arena(system, f"{self.url.rsplit('/', 1)[0]}/{name}", self.directory)

    @contextmanager
    def arenas(self, *systems: System) -> Iterator[list[Arena]]:
        """Those that can be measured here, ours first, each in a database of its own."""
        with ExitStack() as resources:
            yield [
                resources.enter_context(self.arena(system))
                for system in systems
                if system.is_here or self.has(system)
            ]

    def has(self, system: System) -> bool:
        if not self.with_peers:
            return False
        try:
            system.install()
        except NotInstalled as error:
            self.misses(f"{system.name}: {error}")
            return False
        return True

    def misses(self, what: str) -> None:
        """Something is not installed here, and its figures are left out: the report says so."""
        if what not in self.missing:
            self.missing.append(what)


def in_turns(
    arenas: list[Arena], turns: int, measure: Callable[[Arena], float]
) -> dict[str, list[float]]:
    """A B A B: each measured once a turn, so that a drift of the machine meets all alike."""
    found: dict[str, list[float]] = {arena.label: [] for arena in arenas}
    for _ in range(turns):
        for arena in arenas:
            found[arena.label].append(measure(arena))
    return found
