"""Turns pages into HTML: the Jinja environment, its filters, and the files beside the pages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from mimetypes import guess_type
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from pgqueue.dashboard.tracebacks import frames
from pgqueue.terminal import harmless
from pgqueue.views.words import span as span


def number(value: int | None) -> str:
    """A number with a comma at the thousands; a dash for one that is not known."""
    return "–" if value is None else f"{value:,}"  # noqa: RUF001


def figure(value: float | None, format: Literal["number", "span"]) -> str:
    """A number of a chart; a span is in seconds."""
    return span(value) if format == "span" or value is None else number(int(value))


Series = Sequence[tuple[str, str, Sequence[float | None]]]
"""Of a chart: the name of each line or part of a bar, its kind in the style sheet, its numbers."""


@dataclass(frozen=True, slots=True)
class ChartSlot:
    """A time in a chart."""

    x: float
    """Its left end, in percent of the width."""
    time: str
    figures: Sequence[str]
    """The numbers of the series, in words."""
    hint: str
    """What is shown when one points at it."""
    bars: Sequence[tuple[str, float, float]]
    """From the lowest: their kinds, upper ends and heights, in percent of the height."""


@dataclass(frozen=True, slots=True)
class Plot:
    """What a chart shows, made here, because a template takes several times as long."""

    axis: Sequence[str]
    """The numbers beside it, from the top."""
    slots: Sequence[ChartSlot]
    lines: Sequence[tuple[str, str]]
    """The kind of each line, and its path; a slot is 1 wide, and the chart 100 high."""


def plot(
    times: Sequence[datetime], series: Series, format: Literal["number", "span"], *, lines: bool
) -> Plot:
    """The bars of a chart, or its lines."""
    by_time = list(zip(*(values for _, _, values in series), strict=True))
    together = max if lines else sum
    high = max((together(value or 0 for value in values) for values in by_time), default=0)
    powers = range(-3 if format == "span" else 0, 12)
    tops = (step * 10.0**power for power in powers for step in (2, 4, 6, 8, 10))
    top = next(top for top in tops if top >= high)
    half = top / 2 if format == "span" else int(top / 2)
    slots = []
    for number, (time, values) in enumerate(zip(times, by_time, strict=True)):
        moment, figures = f"{time:%d %b %H:%M}", [figure(value, format) for value in values]
        named = (f"{name}: {one}" for (name, _, _), one in zip(series, figures, strict=True))
        bars = [] if lines else _stacked([kind for _, kind, _ in series], values, top)
        hint = "\n".join((f"{moment} UTC", *named))
        slots.append(ChartSlot(round(100 * number / len(times), 3), moment, figures, hint, bars))
    paths = [(kind, _path(values, top)) for _, kind, values in series] if lines else []
    return Plot([figure(one, format) for one in (top, half, 0)], slots, paths)


def _stacked(
    kinds: Sequence[str], values: Sequence[float | None], top: float
) -> list[tuple[str, float, float]]:
    y, bars = 100.0, []
    for kind, value in zip(kinds, values, strict=True):
        if value:
            height = 100 * value / top
            y -= height
            bars.append((kind, round(y, 2), round(height, 2)))
    return bars


def _path(values: Sequence[float | None], top: float) -> str:
    """The path of a line, with a gap where there is no number."""
    path, is_down = [], False
    for number, value in enumerate(values):
        if value is not None:
            place = f"{number + 0.5} {100 - 100 * value / top:.2f}"
            path.append(f"L{place}" if is_down else f"M{place}h0")
        is_down = value is not None
    return "".join(path)


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
    "plot": plot,
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
