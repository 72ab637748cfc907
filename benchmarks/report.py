"""What a run says: a table on the terminal, and a page with charts."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import click
import psycopg

from benchmarks import charts
from benchmarks.case import CASES, Bench, Case, Finding, Goal, Series
from benchmarks.systems import PEERS, PGQUEUE

DOCS = Path(__file__).parent.parent / "docs" / "explanation"
PAGE = DOCS / "benchmarks.md"
CHARTS = DOCS / "benchmarks"
HEAD = ""
"""The name of what stands above all cases."""
TOLD = (
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "shared_buffers",
    "max_wal_size",
    "min_wal_size",
)


@dataclass(frozen=True)
class Result:
    """One case, and what it has shown, or why it has shown nothing."""

    case: Case
    finding: Finding | None
    seconds: float
    failure: str = ""


@dataclass(frozen=True)
class About:
    """Where and how it was measured."""

    machine: str
    server: str
    size: str
    systems: tuple[str, ...]
    missing: tuple[str, ...]


def about(bench: Bench, size: str) -> About:
    with psycopg.connect(bench.url) as connection:
        version = connection.execute("SHOW server_version").fetchone()
        assert version is not None
        settings = []
        for name in TOLD:
            value = connection.execute(f"SHOW {name}").fetchone()
            assert value is not None
            settings.append(f"{name} = {value[0]}")
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    server = f"PostgreSQL {version[0]}, {', '.join(settings)}"
    beside = PEERS if bench.with_peers else ()
    systems = [one.versioned_name for one in (PGQUEUE, *beside) if one.is_installed]
    return About(machine, server, size, tuple(systems), tuple(bench.missing))


def as_data(result: Result) -> dict[str, Any]:
    """The figures of a case, for a program."""
    series = [] if result.finding is None else result.finding.series
    return {
        "case": result.case.name,
        "series": [{"name": one.name, "values": one.values, "unit": one.unit} for one in series],
        "failure": result.failure,
    }


def show(result: Result) -> None:
    """One case, on the terminal."""
    click.secho(f"{result.case.name}  {result.seconds:.0f} s", bold=True)
    click.echo(f"  {result.case.title}")
    if result.finding is None:
        click.secho(f"  spoiled: {result.failure}", fg="red")
        return
    for one in result.finding.series:
        click.echo(f"  {one.name:<44} {_spread(one)}")
    for goal in result.finding.goals:
        color = None if _is_open(goal) else "green" if goal.is_met else "red"
        click.secho(f"  {goal.what:<44} {_figure(goal)}  {_bound(goal)}", fg=color)
    for remark in result.finding.remarks:
        click.echo(f"  {remark}")


def show_missing(missing: list[str]) -> None:
    for what in missing:
        click.secho(f"left out: {what}", fg="yellow")


def write(results: list[Result], about: About) -> None:
    """The page of the documentation, with a chart for each case; other cases keep their parts."""
    CHARTS.mkdir(exist_ok=True)
    parts = _parts()
    if {one.case.name for one in results} >= set(CASES):
        parts = {HEAD: _head(about)}
    for one in results:
        if one.finding is not None:
            charts.draw(one.case, one.finding, CHARTS / f"{one.case.name}.svg")
            parts[one.case.name] = _section(one.case, one.finding, about)
    PAGE.write_text("\n".join(parts[name] for name in (HEAD, *CASES) if name in parts))


def _parts() -> dict[str, str]:
    """What stands on the page, by case."""
    head, *sections = PAGE.read_text().split("\n## ")
    return {HEAD: head} | {one.partition("\n")[0]: f"## {one}" for one in sections}


def _head(about: About) -> str:
    left_out = "".join(f"Left out: {what}.\n" for what in about.missing)
    return (
        "# Benchmarks\n\n"
        'Written by `make bench ARGS="--full --write"`; do not edit. `--only NAME` runs one case. '
        "What the cases measure and how: "
        "`benchmarks/README.md`. Where the time goes, and what each safety "
        "feature costs: [performance](performance.md).\n\n"
        f"The machine has {about.machine}, shared by client, workers and server. All systems use "
        f"the same server: {about.server}, everything else default. The systems are "
        f"{', '.join(about.systems)}. "
        "Each figure is the median of the turns, with the lowest and the highest in parentheses; "
        "each ratio is the median of the ratios of the turns. The speed of the machine varies, so "
        "quote the ratios.\n"
        f"{left_out}"
    )


def _section(case: Case, finding: Finding, about: About) -> str:
    lines = [f"## {case.name}\n", f"{case.title} ({date.today():%Y-%m-%d}, {about.size})\n"]
    lines += ["| | | goal |", "|---|---|---|"]
    measured = {one.name for one in finding.series}
    bounds = {goal.what: f"{_bound(goal)}{_verdict(goal)}" for goal in finding.goals}
    lines += [
        f"| {one.name} | {_spread(one)} | {bounds.get(one.name, '')} |" for one in finding.series
    ]
    lines += [
        f"| {goal.what} | {_figure(goal)} | {bounds[goal.what]} |"
        for goal in finding.goals
        if goal.what not in measured
    ]
    lines += ["", *finding.remarks] if finding.remarks else []
    if charts.is_worth_drawing(finding):
        lines += ["", f"![{case.name}](benchmarks/{case.name}.svg)"]
    return "\n".join([*lines, ""])


def _spread(one: Series) -> str:
    least, most = min(one.values), max(one.values)
    middle = f"{_number(one.median)} {one.unit}"
    return middle if least == most else f"{middle} ({_number(least)} to {_number(most)})"


def _figure(goal: Goal) -> str:
    least, most = min(goal.values), max(goal.values)
    unit = "" if goal.unit == "x" else f" {goal.unit}"
    figure = f"{'x ' if goal.unit == 'x' else ''}{_number(goal.median)}{unit}"
    return figure if least == most else f"{figure} ({_number(least)} to {_number(most)})"


def _bound(goal: Goal) -> str:
    if goal.at_least is not None:
        return f">= {goal.at_least:g}"
    return "" if goal.at_most is None else f"<= {goal.at_most:g}"


def _verdict(goal: Goal) -> str:
    if _is_open(goal):
        return ""
    return ", met" if goal.is_met else ", **missed**"


def _is_open(goal: Goal) -> bool:
    return goal.at_least is None and goal.at_most is None


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}"
