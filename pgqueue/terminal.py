"""What commands print: tables for a terminal of any width or a pipe, and JSON for programs."""

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
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
    texts = [
        [
            f"{cell:,}" if isinstance(cell, int) else harmless(" ".join(str(cell).split()))
            for cell in row
        ]
        for row in (columns, *rows)
    ]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    are_numbers = [
        bool(rows) and all(isinstance(row[index], int) for row in rows)
        for index in range(len(columns))
    ]
    window = None  # a pipe has no width to fit
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        window = shutil.get_terminal_size().columns
        room = window - len(GAP) * (len(widths) - 1)
        while sum(widths) > room and max(widths) > NARROWEST:
            widths[widths.index(max(widths))] -= 1
    for number, row_texts in enumerate(texts):
        cells = []
        for text, width, is_number in zip(row_texts, widths, are_numbers, strict=True):
            cut = text if len(text) <= width else f"{text[: width - 3]}..."
            cells.append(cut.rjust(width) if is_number else cut.ljust(width))
        click.secho(GAP.join(cells)[:window].rstrip(), bold=number == 0)
