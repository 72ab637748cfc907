"""What commands print: tables for a terminal of any width or a pipe, and JSON for programs."""

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from pgqueue.redaction import redacted

GAP = "  "
NARROWEST = 8
"""A column is not cut to fewer characters."""

_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that a terminal obeys or reverses instead of showing; not tabs and line ends."""


def harmless(text: str) -> str:
    """Make untrusted text, such as an argument or an error, harmless to the terminal.

    An escape sequence could hide lines, change the title, or send input in the reader's name.
    """
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(error: object) -> str:
    """An error's message for a terminal and a log: one line, no escape sequences, no passwords."""
    return harmless(redacted(" ".join(str(error).split())))


def is_rich() -> bool:
    """Whether standard output is a terminal and rich is installed."""
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def print_json(document: Any) -> None:
    click.echo(json.dumps(as_data(document), indent=2))


def as_data(value: Any) -> Any:
    """Convert to JSON data: ids and enums as text, times as ISO in UTC, durations as seconds."""
    match value:
        case dict():
            return {key: as_data(item) for key, item in value.items()}
        case tuple() if hasattr(value, "_asdict"):
            return as_data(value._asdict())
        case list() | tuple():
            return [as_data(item) for item in value]
        case datetime():
            return value.astimezone(UTC).isoformat()
        case timedelta():
            return value.total_seconds()
        case None | bool() | int() | float():
            return value
        case _ if is_dataclass(value):
            return as_data({field.name: getattr(value, field.name) for field in fields(value)})
        case _:
            return str(value)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, otherwise: str = ""
) -> None:
    """Print rows below their headings: numbers to the right, long texts cut to the window.

    ``otherwise``: what to print if there are no rows.
    """
    if otherwise and not rows:
        click.echo(otherwise)
        return
    if is_rich():
        _print_rich(columns, rows)
        return
    for line in _lines(columns, rows):
        click.echo(line)


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for index, line in enumerate(_lines(columns, rows)):
        # Text, not str: a file name may contain rich markup.
        console.print(Text(line, style="bold" if index == 0 else ""), overflow="crop", no_wrap=True)


def _lines(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    texts = [list(columns), *([_as_text(value) for value in row] for row in rows)]
    widths = [max(len(row[index]) for row in texts) for index in range(len(columns))]
    _fit(widths, _window())
    for row in texts:
        cells = []
        for index, (value, width) in enumerate(zip(row, widths, strict=True)):
            cut = value if len(value) <= width else f"{value[: width - 3]}..."
            cells.append(cut.rjust(width) if _is_number(rows, index) else cut.ljust(width))
        yield GAP.join(cells).rstrip()


def _fit(widths: list[int], window: int | None) -> None:
    """Narrow the widest column until the row fits; a pipe has no width to fit."""
    if window is None:
        return
    room = window - len(GAP) * (len(widths) - 1)
    while sum(widths) > room and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1


def _window() -> int | None:
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return None


def _as_text(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return harmless(" ".join(str(value).split()))


def _is_number(rows: Sequence[Sequence[Any]], index: int) -> bool:
    return bool(rows) and all(isinstance(row[index], int) for row in rows)
