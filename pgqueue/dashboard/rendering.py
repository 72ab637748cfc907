"""Turns pages into HTML: the Jinja environment, its filters, and the files beside the pages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from mimetypes import guess_type
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from pgqueue.dashboard.tracebacks import frames
from pgqueue.terminal import harmless

UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def number(value: int | None) -> str:
    """A number with a comma at the thousands; a dash for one that is not known."""
    return "–" if value is None else f"{value:,}"  # noqa: RUF001


def span(value: timedelta | float | None) -> str:
    """A duration in its largest unit, with two digits below ten; a dash for one that is unknown."""
    if value is None:
        return "–"  # noqa: RUF001
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if abs(seconds) < 1:
        return f"{round(seconds * 1000)} ms"
    size, unit = next((size, unit) for size, unit in UNITS if abs(seconds) >= size)
    amount = seconds / size
    digits = 1 if abs(amount) < 10 and unit != "min" else 0
    return f"{amount:.{digits}f} {unit}"


def figure(value: float | None, format: Literal["number", "span"]) -> str:
    """A number of a chart; a span is in seconds."""
    return span(value) if format == "span" or value is None else number(int(value))


def words(
    series: Sequence[tuple[str, str, Sequence[float | None]]], format: Literal["number", "span"]
) -> list[list[tuple[str, str]]]:
    """The names and numbers of a chart by time, made once for its bars and its table."""
    names = [name for name, _, _ in series]
    slots = zip(*(values for _, _, values in series), strict=True)
    return [
        [(name, figure(value, format)) for name, value in zip(names, slot, strict=True)]
        for slot in slots
    ]


def minutes(times: Sequence[datetime]) -> list[str]:
    """The times of a chart, made once for its bars and its table."""
    return [f"{time:%d %b %H:%M}" for time in times]


def stacks(
    series: Sequence[tuple[str, str, Sequence[float | None]]], top: float
) -> list[list[tuple[str, float, float]]]:
    """The bars of a chart by time, from the lowest: their kinds, upper ends and heights, in percent
    of the height for ``top``.

    Here, because a template takes several times as long for this.
    """
    found = []
    for slot in zip(*(values for _, _, values in series), strict=True):
        y, bars = 100.0, []
        for (_, kind, _), value in zip(series, slot, strict=True):
            if value:
                height = 100 * value / top
                y -= height
                bars.append((kind, round(y, 2), round(height, 2)))
        found.append(bars)
    return found


def highest(series: Sequence[tuple[str, str, Sequence[float | None]]], *, stacked: bool) -> float:
    """The largest number of a chart, or with ``stacked`` the largest sum at one time; 0 if none."""
    slots = zip(*(values for _, _, values in series), strict=True)
    together = sum if stacked else max
    return max((together(value or 0 for value in slot) for slot in slots), default=0)


def age(time: datetime | None, now: datetime) -> str:
    """How long ago a time is, or how far ahead."""
    if time is None:
        return "–"  # noqa: RUF001
    seconds = (now - time).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"{span(seconds)} ago" if seconds > 0 else f"in {span(-seconds)}"


def moment(time: datetime | None) -> str:
    """A time in UTC, with its seconds."""
    return "–" if time is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}"  # noqa: RUF001


def clock_time(time: datetime | None) -> str:
    """The time of the day in UTC."""
    return "–" if time is None else f"{time.astimezone(UTC):%H:%M:%S}"  # noqa: RUF001


def iso(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds")


def visible(value: object) -> str:
    """Text of a job, with control and bidirectional characters as their escapes."""
    return harmless(str(value))


FILTERS: Mapping[str, Callable[..., Any]] = {
    "number": number,
    "span": span,
    "figure": figure,
    "words": words,
    "minutes": minutes,
    "stacks": stacks,
    "highest": highest,
    "age": age,
    "moment": moment,
    "clock": clock_time,
    "iso": iso,
    "visible": visible,
    "frames": frames,
}


@cache
def environment() -> Environment:
    """The templates; a variable that does not exist is an error."""
    made = Environment(
        loader=PackageLoader("pgqueue.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(FILTERS)
    return made


def render(template: str, variables: Mapping[str, Any]) -> str:
    return environment().get_template(template).render(variables)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the dashboard; its address has its hash, so a browser may keep it for ever."""

    content: bytes
    media_type: str
    digest: str


@cache
def static_files() -> dict[str, StaticFile]:
    """The style sheet, the script, icons and vendored files, by name."""
    folder = files("pgqueue.dashboard") / "static"
    return {name: _read(file) for name, file in _below(folder, "")}


def _below(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found = []
    for each in folder.iterdir():
        name = f"{prefix}{each.name}"
        found += _below(each, f"{name}/") if each.is_dir() else [(name, each)]
    return found


def _read(file: Traversable) -> StaticFile:
    content = file.read_bytes()
    media_type = guess_type(file.name)[0] or "application/octet-stream"
    return StaticFile(content, media_type, sha256(content).hexdigest()[:12])
