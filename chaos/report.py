"""What the battery has shown: a line for each scenario, their sum, and a table in the docs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from chaos.running import Verdict
from chaos.scenario import load

PAGE = Path(__file__).parent.parent / "docs/explanation/reliability.md"
BEGIN = {
    "full": "<!-- written by `make chaos` -->\n",
    "long": "<!-- written by `make chaos` in its long form -->\n",
}
END = "<!-- end -->\n"

NO_FAULT = {"jobs", "workers", "samples", "second starts", "kB of memory"}
"""Counts that are no faults."""

SUMMED = (
    "kills",
    "deaths",
    "freezes",
    "partitions",
    "server crashes",
    "server restarts",
    "promotions",
    "outages",
    "terminated connections",
    "ended transactions",
    "cuts",
    "stops",
    "clocks set",
    "damaged rows",
)
"""The faults of which a sum over all scenarios says something."""

console = Console()


@dataclass(frozen=True)
class Summary:
    """One run of the battery."""

    verdicts: list[Verdict]
    left_out: dict[str, list[str]]
    seed: int
    size: str
    machine: str
    seconds: float

    @property
    def totals(self) -> Counter[str]:
        return sum((Counter(verdict.counts) for verdict in self.verdicts), Counter())

    def words(self) -> str:
        """All of it in three sentences."""
        totals = self.totals
        faults = ", ".join(f"{totals[what]:,} {what}" for what in SUMMED if totals[what])
        broken = sum(verdict.broken is not None for verdict in self.verdicts)
        minutes, seconds = divmod(round(self.seconds), 60)
        return (
            f"{len(self.verdicts)} scenarios in {minutes} min {seconds} s, {totals['jobs']:,} jobs,"
            f" {totals['workers']:,} worker processes; {faults}."
            f" {totals['second starts']:,} jobs started a second time after their worker was"
            f" hit by a fault. {broken or 'No'} scenario{'s' * (broken > 1)} broke a promise."
            f" The invariants were checked {totals['samples']:,} times; one violation fails its"
            " scenario."
        )


def show_line(verdict: Verdict) -> None:
    word = "[green]holds[/]" if verdict.broken is None else "[red]BROKEN[/]"
    console.print(f"{word} {verdict.scenario}  {verdict.seconds:.1f} s  {_faults(verdict)}")
    if verdict.broken is not None:
        console.print(verdict.broken, markup=False, highlight=False)


def show(summary: Summary) -> None:
    for name, missing in summary.left_out.items():
        console.print(f"left out: {name} needs {', '.join(missing)}")
    console.print(summary.words(), f"Seed {summary.seed}.", markup=False)


def write(summary: Summary) -> None:
    """Replace what an earlier run has written into the page."""
    _replace(BEGIN[summary.size], _markdown(summary))


def _replace(begin: str, new: str) -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{begin}{new}{END}{after}")


def _markdown(summary: Summary) -> str:
    scenarios = load()
    day = datetime.now(UTC).date()
    size = "" if summary.size == "full" else f" in the {summary.size} form"
    lines = [
        f"Run of {day}{size}, seed {summary.seed}, on {summary.machine}: {summary.words()}",
        "",
        "| what is done, and what must hold | jobs | faults |",
        "|---|--:|---|",
    ]
    for verdict in sorted(summary.verdicts, key=lambda verdict: verdict.scenario):
        one = scenarios[verdict.scenario]
        faults = [_faults(verdict)] if _faults(verdict) else []
        if again := verdict.counts.get("second starts", 0):
            faults.append(f"{again:,} second starts")
        if verdict.broken is not None:
            faults.append("**broken**")
        jobs = verdict.counts.get("jobs", 0)
        lines.append(f"| {one.title} (`{one.name}`) | {jobs:,} | {', '.join(faults)} |")
    for name, missing in summary.left_out.items():
        lines.append(f"| `{name}` | | left out: needs {', '.join(missing)} |")
    return "\n".join([*lines, "", ""])


def _faults(verdict: Verdict) -> str:
    return ", ".join(f"{n:,} {what}" for what, n in verdict.counts.items() if what not in NO_FAULT)
