"""The jobs: by status, by a filter, page by page, and as CSV."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from pgqueue.dashboard.rendering import number
from pgqueue.dashboard.routing import Answer, Asked, Done, Download, Page, Refused, Route
from pgqueue.errors import OptionError
from pgqueue.filter_line import LONGEST, STATUSES, line_of, parse, word_of
from pgqueue.models import JobStatus
from pgqueue.operations import Selection
from pgqueue.operations.actions import DEAD, WAITING
from pgqueue.redaction import redacted
from pgqueue.repository.conditions import WRITTEN, JobFilter, Kind
from pgqueue.repository.listing import UNFINISHED, Listing
from pgqueue.repository.pages import JobLine, JobPage, Pages, PageStart, page_start, words_of
from pgqueue.repository.queue_minutes import LastCount, QueueMinutes
from pgqueue.tasks.showing import shown_arguments

LIMIT = 25
MOST_IN_FILE = 1000
MOST_COUNTED = 1000
"""Failed and cancelled jobs are counted up to this number."""
TABS = ("running", "due", "scheduled", "retrying", "blocked", "failed", "succeeded", "cancelled")
CONDITIONS = tuple(
    dict.fromkeys(
        each.metadata["word"]
        for each in WRITTEN.values()
        if each.metadata["kind"] not in (Kind.JOB, Kind.BATCH)
    )
)
"""The words that the form adds to the line."""
LONGEST_CELL = 2000
"""Characters of arguments and errors; the list shows fewer."""
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What a spreadsheet may take for a formula, at the beginning of a cell; also in full width."""


@dataclass(frozen=True, slots=True)
class Row:
    """A job, as the list shows it."""

    line: JobLine
    state: str
    arguments: str | None
    """None without the right to see them."""
    worker: str | None
    error: str

    @property
    def ran(self) -> timedelta | None:
        """How long the last attempt ran, of a job that has ended."""
        line = self.line
        if line.started_at is None or line.finished_at is None:
            return None
        return line.finished_at - line.started_at


@dataclass(frozen=True, slots=True)
class Rows:
    """A part of the list."""

    rows: list[Row]
    page: JobPage


@dataclass(frozen=True, slots=True)
class Counts:
    """How many jobs there are, by tab; tabs that are missing are not counted."""

    jobs: Mapping[str, str]
    counted: LastCount | None


def jobs(asked: Asked) -> Answer:
    """The jobs of a filter, the newest first or in the order in which they start."""
    line = asked.text("q", longest=LONGEST)
    try:
        which = parse(_with_condition(asked, line))
    except OptionError as error:
        return _page(asked, JobFilter(), line, error=str(error))
    if isinstance(which, int):
        return Done("", to=asked.url("job", job_id=which))
    _check_arguments(asked, which)
    return _page(asked, which, line_of(which))


def _page(asked: Asked, which: JobFilter, line: str, *, error: str = "") -> Page:
    start = _start(asked)
    current = "" if error else "all"
    if which.statuses:
        current = next((tab for tab in TABS if which == _in_tab(which, tab)), "")
    found = counts = None
    if not error:
        found = asked.part("the list", lambda session: _read(asked, session, which, start, LIMIT))
    if not error and not line_of(_in_tab(which, None)):
        counts = asked.part("the numbers of jobs", lambda session: _count(asked, session))
    tabs = [
        {
            "label": tab.capitalize(),
            "href": asked.url("jobs", q=line_of(_in_tab(which, tab)) or None),
            "current": tab == current,
            "count": None if counts is None else counts.jobs.get(tab),
        }
        for tab in ("all", *TABS)
    ]
    next_start = None if found is None else found.page.next_start
    statuses = which.statuses or frozenset(JobStatus)
    option = f" --where '{line}'" if line and "'" not in line else ""
    return Page(
        "jobs.html",
        title="Jobs",
        command="" if error else f"pgqueue jobs{option}",
        status=400 if error else 200,
        line=line,
        error=error,
        tabs=tabs,
        counted=None if counts is None else counts.counted,
        found=found,
        start=start,
        next_start=None if next_start is None else words_of(next_start),
        conditions=CONDITIONS,
        unknown_task="" if which.task in (None, *asked.queue.tasks) else which.task,
        requeues=bool(statuses.intersection(DEAD)),
        cancels=bool(statuses.intersection(UNFINISHED)),
        are_waiting=statuses.issubset(WAITING),
        shows_arguments=asked.may("view_arguments"),
    )


def jobs_csv(asked: Asked) -> Download:
    """The first jobs of a filter as CSV."""
    which = parse(asked.text("q", longest=LONGEST))
    if isinstance(which, int):
        raise Refused("a list of jobs is asked for by a filter, not by an id")
    _check_arguments(asked, which)
    found = _read(asked, asked.session, which, _start(asked), MOST_IN_FILE)
    return Download("jobs.csv", [_csv(found.rows)])


def _csv(rows: list[Row]) -> str:
    columns = [name for name in JobLine._fields if name not in ("status", "last_error")]
    written = io.StringIO()
    lines = csv.writer(written)
    lines.writerow(["status", *columns, "arguments", "last_error"])
    for row in rows:
        values = [getattr(row.line, name) for name in columns]
        cells = [row.line.status.value, *values, row.arguments, row.error]
        lines.writerow([_cell(value) for value in cells])
    return written.getvalue()


def _cell(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(FORMULA) else text


def _with_condition(asked: Asked, line: str) -> str:
    """The line, and what the form adds to it."""
    value = asked.text("value", longest=LONGEST).strip()
    if not value:
        return line
    word = asked.one_of("word", CONDITIONS, "task")
    if word == "arg.NAME":
        name, _, value = value.partition(":")
        return f"{line} arg.{name.strip()}:{value.strip()}"
    return (
        f"{line} {word}:{value}"
        if word in ("created", "took")
        else f"{line} {word_of(word, value)}"
    )


def _check_arguments(asked: Asked, which: JobFilter) -> None:
    """Refuse to search for what the user may not see."""
    asked.check_filter(which)
    try:
        Selection.of(which).check_arguments(asked.queue.tasks, for_log=False)
    except OptionError as error:
        raise Refused(str(error), 403) from error


def _start(asked: Asked) -> PageStart | None:
    text = asked.text("before")
    try:
        return page_start(text) if text else None
    except ValueError:
        raise Refused(f"before is {text[:40]!r}, which no page has given") from None


def _read(
    asked: Asked, session: Session, which: JobFilter, start: PageStart | None, limit: int
) -> Rows:
    page = Pages(session).page(asked.scope(which), limit=limit, start=start)
    tasks, lines = asked.queue.tasks, page.jobs
    if which.args:  # of an unknown task, all arguments are hidden
        lines = [line for line in lines if line.task in tasks]
    ids, listing = [line.id for line in lines], Listing(session)
    args = listing.arguments(ids) if asked.may("view_arguments") else {}
    holders = listing.holders(ids)
    rows = [
        Row(
            line,
            _state(line, asked.now),
            _in_one_line(shown_arguments(args[line.id], tasks.get(line.task)))
            if line.id in args
            else None,
            holders.get(line.id),
            redacted(line.last_error or "")[:LONGEST_CELL],
        )
        for line in lines
    ]
    return Rows(rows, page)


def _state(line: JobLine, now: datetime) -> str:
    """The word for a status; of a pending job, what it waits for."""
    if line.status is not JobStatus.PENDING:
        return line.status.value
    if line.attempts:
        return "retrying"
    return "scheduled" if line.run_at > now else "due"


def _in_one_line(args: Any) -> str:
    if not isinstance(args, dict):
        return str(args)
    return ", ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in args.items()
    )


def _in_tab(which: JobFilter, tab: str | None) -> JobFilter:
    """The filter with the status of a tab."""
    everything: dict[str, Any] = {"statuses": frozenset(), "are_due": None, "are_retried": None}
    return replace(which, **{**everything, **STATUSES.get(tab or "", {})})


def _count(asked: Asked, session: Session) -> Counts:
    """What an index counts, up to a number; and of queues, what a worker has counted last."""
    found = {}
    for tab in ("running", "failed", "cancelled"):
        which = asked.scope(JobFilter(**STATUSES[tab]))
        jobs = Listing(session).count(which, limit=MOST_COUNTED + 1)
        found[tab] = f"{number(MOST_COUNTED)}+" if jobs > MOST_COUNTED else number(jobs)
    latest = None if asked.access.tags is not None else QueueMinutes(session).latest()
    if latest is not None:
        seen = asked.access.queues
        queues = [count for name, count in latest.queues.items() if seen is None or name in seen]
        found["due"] = number(sum(count.due for count in queues))
        found["blocked"] = number(sum(count.blocked for count in queues))
    return Counts(found, latest)


ROUTES = [Route("/jobs", jobs), Route("/jobs.csv", jobs_csv)]
