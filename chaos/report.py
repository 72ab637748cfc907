"""What the battery has shown: lines while it runs, a table at its end, the same in the docs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chaos.running import Verdict
from chaos.scenario import load

PAGE = Path(__file__).parent.parent / "docs/explanation/reliability.md"
BEGIN_PEERS = "<!-- written by `python -m chaos peers` -->\n"
BEGIN, END = "<!-- written by `make chaos` -->\n", "<!-- end -->\n"

NO_FAULT = {"jobs", "workers", "samples", "second starts", "kB of memory"}
"""Counts that are no faults."""

TIMES = {"slowest ms", "milliseconds for them"}
"""What the scenarios have measured: shown with each of them, and no sum says anything."""

console = Console()


@dataclass(frozen=True)
class Summary:
    """One run of the battery."""

    verdicts: list[Verdict]
    left_out: dict[str, list[str]]
    seed: int
    short: bool
    machine: str

    @property
    def totals(self) -> Counter[str]:
        return sum((Counter(verdict.counts) for verdict in self.verdicts), Counter())

    def words(self) -> str:
        """All of it in two sentences."""
        totals = self.totals
        told = [what for what in totals if what not in NO_FAULT | TIMES]
        faults = ", ".join(f"{totals[what]:,} {what}" for what in told)
        broken = sum(verdict.broken is not None for verdict in self.verdicts)
        return (
            f"{len(self.verdicts)} scenarios, {totals['jobs']:,} jobs, {totals['workers']:,} worker"
            f" processes; {faults}. {totals['second starts']:,} jobs started a second time after"
            f" their worker was harmed, and {broken} scenarios found a promise broken;"
            f" {totals['samples']:,} times all invariants were asked for while they ran."
        )


def show_line(verdict: Verdict) -> None:
    word = "[green]holds[/]" if verdict.broken is None else "[red]BROKEN[/]"
    console.print(f"{word} {verdict.scenario}  {verdict.seconds:.1f} s  {_faults(verdict)}")
    if verdict.broken is not None:
        console.print(verdict.broken, markup=False, highlight=False)


def show(summary: Summary) -> None:
    """The table."""
    scenarios = load()
    table = Table("scenario", "promises", "jobs", "faults", "second starts", "seconds", "")
    for verdict in sorted(summary.verdicts, key=lambda verdict: verdict.scenario):
        table.add_row(
            verdict.scenario,
            scenarios[verdict.scenario].promises,
            f"{verdict.counts.get('jobs', 0):,}",
            _faults(verdict),
            f"{verdict.counts.get('second starts', 0):,}",
            f"{verdict.seconds:.0f}",
            "holds" if verdict.broken is None else "BROKEN",
        )
    console.print(table)
    for name, missing in summary.left_out.items():
        console.print(f"left out: {name} needs {', '.join(missing)}")
    console.print(summary.words(), f"Seed {summary.seed}.", markup=False)


def write(summary: Summary) -> None:
    """Replace what an earlier run has written into the page."""
    _replace(BEGIN, _markdown(summary))


def show_peers(figures: dict[str, dict[str, str]]) -> None:
    table = Table("", *figures)
    for row in _rows_of(figures):
        table.add_row(*row)
    console.print(table)


def write_peers(figures: dict[str, dict[str, str]]) -> None:
    lines = [f"| | {' | '.join(figures)} |", "|---" * (len(figures) + 1) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in _rows_of(figures)]
    _replace(BEGIN_PEERS, "\n".join([f"Run of {datetime.now(UTC).date()}:", "", *lines, "", ""]))


def _rows_of(figures: dict[str, dict[str, str]]) -> list[list[str]]:
    questions = next(iter(figures.values()))
    return [[question, *(found[question] for found in figures.values())] for question in questions]


def _replace(begin: str, new: str) -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{begin}{new}{END}{after}")


def _markdown(summary: Summary) -> str:
    scenarios = load()
    day = datetime.now(UTC).date()
    size = " short form" if summary.short else ""
    lines = [
        f"Run of {day}{size}, seed {summary.seed}, on {summary.machine}: {summary.words()}",
        "",
        "| what is done, and what must hold | promises | jobs | faults | second starts | verdict |",
        "|---|---|--:|---|--:|---|",
    ]
    for verdict in sorted(summary.verdicts, key=lambda verdict: verdict.scenario):
        one = scenarios[verdict.scenario]
        lines.append(
            f"| {one.title} (`{one.name}`) | {one.promises} | {verdict.counts.get('jobs', 0):,} |"
            f" {_faults(verdict)} | {verdict.counts.get('second starts', 0):,} |"
            f" {'holds' if verdict.broken is None else '**broken**'} |"
        )
    for name, missing in summary.left_out.items():
        lines.append(f"| `{name}` | | | | | left out: needs {', '.join(missing)} |")
    return "\n".join([*lines, "", ""])


def _faults(verdict: Verdict) -> str:
    return ", ".join(f"{n:,} {what}" for what, n in verdict.counts.items() if what not in NO_FAULT)
