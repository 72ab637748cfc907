"""What is to be seen while the demo runs: a bar, or a line each second."""

import time
from types import TracebackType
from typing import Any

import click

from pgqueue.terminal import is_rich

EVERY = 1.0


class Lines:
    """For a pipe, and where rich is not installed."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began = self._shown_at = time.monotonic()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to tidy up."""

    def say(self, words: str) -> None:
        click.echo(words)

    def show(self, ended: int) -> None:
        now = time.monotonic()
        if now - self._shown_at < EVERY:
            return
        self._shown_at = now
        rate = ended / (now - self._began)
        click.echo(f"  {ended:>6,} of {self._total:,} jobs have ended, {rate:,.0f} a second")


class Bar:
    """For a terminal."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        self._progress = Progress(TextColumn(" "), *columns, transient=True)
        self._task = self._progress.add_task("", total=total, rate="")
        self._began = time.monotonic()

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, words: str) -> None:
        self._progress.console.print(words, highlight=False, markup=False)

    def show(self, ended: int) -> None:
        rate = f"{ended / (time.monotonic() - self._began):,.0f} jobs/s"
        self._progress.update(self._task, completed=ended, rate=rate)


def progress(total: int) -> Lines | Bar:
    return Bar(total) if is_rich() else Lines(total)
