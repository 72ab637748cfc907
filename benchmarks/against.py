"""Measures this tree beside the tree of another commit: ``--against REV``.

Both are measured by the cases of this tree, so that a case that has changed since is the same for
both.  Each turn of a case runs in a process of its own, in a tree of its own, on one server.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import click

HERE = Path(__file__).parents[1]
LEAST = 0.98
"""A smaller ratio is red."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One figure of a case in both trees, turn by turn."""

    name: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """How many times as good this tree is, turn by turn: more jobs/s, or less time."""
        is_rate = self.unit.endswith("/s")
        return [
            a / b if is_rate else b / a for a, b in zip(self.ours, self.theirs, strict=True) if a
        ]


def compare(revision: str, names: Sequence[str], *, size: str, turns: int, url: str) -> bool:
    """Measure these cases in both trees, in turns; return whether all could be measured."""
    are_measured = True
    with _tree_of(revision) as theirs:
        for name in names:
            click.secho(name, bold=True)
            pairs: dict[str, Pair] = {}
            try:
                for turn in range(turns):
                    order = (HERE, theirs) if turn % 2 else (theirs, HERE)
                    found = {tree: _measured(tree, name, size, url) for tree in order}
                    _add(pairs, found[HERE], found[theirs])
            except subprocess.CalledProcessError as error:
                are_measured = False
                said = (error.stderr or error.stdout).strip()
                click.secho(f"  not measured: {said[-1000:]}", fg="red")
            for pair in pairs.values():
                _show(pair)
    return are_measured


@contextmanager
def _tree_of(revision: str) -> Iterator[Path]:
    """The files of a commit, with the benchmarks of this tree."""
    with TemporaryDirectory(prefix="pgqueue-against-") as folder:
        archive = subprocess.run(
            ["git", "archive", revision], cwd=HERE, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        tree = Path(folder)
        shutil.rmtree(tree / "benchmarks", ignore_errors=True)
        shutil.copytree(HERE / "benchmarks", tree / "benchmarks")
        yield tree


def _measured(tree: Path, name: str, size: str, url: str) -> list[dict[str, object]]:
    """The series of one turn of a case."""
    options = ["--alone", f"--{size}", "--turns", "1", "--only", name, "--url", url, "--json"]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", *options],
        cwd=tree,
        check=True,
        capture_output=True,
        text=True,
    )
    [result] = json.loads(ended.stdout)
    series: list[dict[str, object]] = result["series"]
    return series


def _add(pairs: dict[str, Pair], ours: list[dict[str, object]], theirs: object) -> None:
    assert isinstance(theirs, list)
    for mine, other in zip(ours, theirs, strict=True):
        name, values, others = str(mine["name"]), mine["values"], other["values"]
        assert isinstance(values, list)
        known = pairs.get(name, Pair(name, str(mine["unit"]), (), ()))
        pairs[name] = Pair(
            name,
            known.unit,
            (*known.ours, statistics.median(values)),
            (*known.theirs, statistics.median(others)),
        )


def _show(pair: Pair) -> None:
    ratio = statistics.median(pair.ratios)
    ours, theirs = statistics.median(pair.ours), statistics.median(pair.theirs)
    click.secho(
        f"  {pair.name:<30} {ours:,.2f} / {theirs:,.2f} {pair.unit}: x {ratio:.3f} "
        f"({min(pair.ratios):.2f} to {max(pair.ratios):.2f}, {len(pair.ratios)} turns)",
        fg="green" if ratio >= LEAST else "red",
    )
