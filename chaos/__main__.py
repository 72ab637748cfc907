"""``python -m chaos``: run the battery, or one scenario of it, and say what it has shown."""

from __future__ import annotations

import json
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

import click

from chaos import report
from chaos.folders import server_folder
from chaos.running import Verdict, play
from chaos.scenario import Scenario, load

LONGEST = 3600.0
"""Seconds after which a run is given up: a scenario bounds each of its waits itself."""

BESIDE = 2
"""Scenarios that mostly wait, and run at the same time."""


FULL = "full"
SHORT = click.option("--short", "size", flag_value="short", help="The sizes of `make chaos-short`.")
LONG = click.option(
    "--long", "size", flag_value="long", help="Only faults that may go on for minutes, and do."
)


@click.group(invoke_without_command=True)
@click.option(
    "--seed", type=int, help="Repeat a run: who is killed, and when. [default: a new one]"
)
@SHORT
@LONG
@click.option("--only", multiple=True, metavar="NAME", help="Only this scenario; may be repeated.")
@click.option("--url", help="A database of your own, for the scenarios that leave the server be.")
@click.option("--write", is_flag=True, help="Put the summary into docs/explanation/reliability.md.")
@click.pass_context
def main(
    context: click.Context,
    *,
    seed: int | None,
    size: str | None,
    only: tuple[str, ...],
    url: str | None,
    write: bool,
) -> None:
    """Run the scenarios, each on a PostgreSQL of its own, and judge them."""
    # A shell ignores it for what it starts in the background, and so would the workers.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if context.invoked_subcommand is not None:
        return
    size = size or FULL
    if write and (only or size == "short"):
        raise click.UsageError("--write shows a whole run: leave out --only and --short")
    chosen = _chosen(only, size)
    seed = random.randrange(10**6) if seed is None else seed
    began = time.monotonic()
    left_out = {one.name: one.missing() for one in chosen if one.missing()}
    verdicts = list(_run_all([o for o in chosen if o.name not in left_out], seed, size, url))
    seconds = time.monotonic() - began
    summary = report.Summary(verdicts, left_out, seed, size, _machine(), seconds)
    report.show(summary)
    if write:
        report.write(summary)
    if any(verdict.broken for verdict in verdicts):
        raise SystemExit(1)


@main.command("list")
def show_list() -> None:
    """Name the scenarios, what each does, and the bugs that it has to catch."""
    for one in load().values():
        bugs = ", ".join(one.mutated)
        click.echo(f"{one.name}\n    {one.title}\n    {one.promises}; catches {bugs}")


@main.command("play")
@click.argument("name")
@click.option("--seed", type=int, default=1)
@SHORT
@LONG
@click.option("--url", help="A database of your own, with nothing in it that you need.")
@click.option("--plant", "mutation", help="Run it with this bug of its own in the product.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the verdict there, as JSON.")
def play_one(
    name: str, seed: int, size: str | None, url: str | None, mutation: str | None, out: Path | None
) -> None:
    """Run one scenario in this process, and print why it broke."""
    one = load()[name]
    with server_folder() as folder:
        verdict = play(one, one.size(size or FULL), folder, seed=seed, url=url, mutation=mutation)
    if out is not None:
        out.write_text(json.dumps(asdict(verdict)))
    elif verdict.broken is None:
        click.echo(f"{name} holds: {verdict.counts}, {verdict.seconds:.1f} s")
    else:
        click.echo(verdict.broken)
    if verdict.broken is not None:
        raise SystemExit(1)


def _chosen(only: tuple[str, ...], size: str) -> list[Scenario]:
    every = load()
    unknown = set(only) - set(every)
    if unknown:
        raise click.BadParameter(f"there is no scenario {', '.join(unknown)}; see `list`")
    whole = [one for one in every.values() if one.in_battery and (size != "long" or one.long)]
    return [one for one in every.values() if one.name in only] if only else whole


def _run_all(chosen: list[Scenario], seed: int, size: str, url: str | None) -> Iterator[Verdict]:
    """Those that need the machine for themselves one by one, then the others side by side."""
    for beside, group in (
        (1, [one for one in chosen if one.alone]),
        (BESIDE, [one for one in chosen if not one.alone]),
    ):
        with ThreadPoolExecutor(beside) as pool:
            runs = [pool.submit(_run, one, seed, size, url) for one in group]
            for run in as_completed(runs):
                verdict = run.result()
                report.show_line(verdict)
                yield verdict


def _run(one: Scenario, seed: int, size: str, url: str | None) -> Verdict:
    """In a process of its own, so that nothing of one scenario is found by the next."""
    with server_folder() as folder:
        out = folder / "verdict.json"
        command = [sys.executable, "-m", "chaos", "play", one.name, "--seed", str(seed)]
        command += ["--out", str(out)] + [f"--{size}"] * (size != FULL)
        command += ["--url", url] if url and one.server.value == "any" else []
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LONGEST, stdin=subprocess.DEVNULL
        )
        if out.exists():
            return Verdict(**json.loads(out.read_text()))
        said = f"{done.stderr[:4000]}\n[...]\n{done.stderr[-2000:]}"
        return Verdict(one.name, 0.0, {}, f"ended with {done.returncode}:\n{said}")


def _machine() -> str:
    import os

    return f"{os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}"


if __name__ == "__main__":
    main()
