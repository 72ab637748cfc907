"""The jobs: by status, by a filter, page by page, and as CSV."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from pgqueue.dashboard.rendering import number
from pgqueue.dashboard.routing import Answer, Done, Download, Page, Refused, Request, Route
from pgqueue.errors import OptionError
from pgqueue.filter_line import LONGEST, word_of
from pgqueue.models import WAITING, JobStatus
from pgqueue.operations import Selection
from pgqueue.operations.actions import ON_JOBS
from pgqueue.operations.selection import WRITTEN, ValueKind
from pgqueue.redaction import redacted
from pgqueue.tasks.showing import shown_arguments
from pgqueue.views.jobs import (
    JobLine,
    JobPage,
    PageStart,
    page_start,
    state_in_words,
    text_of_start,
)
from pgqueue.views.queues import LastCount

LIMIT = 25
MOST_IN_FILE = 1000
MOST_COUNTED = 1000
"""Failed and cancelled jobs are counted up to this number."""
TABS = ("running", "due", "scheduled", "retrying", "blocked", "failed", "succeeded", "cancelled")
CONDITIONS = tuple(
    dict.fromkeys(
        each.metadata["word"]
        for each in WRITTEN.values()
        if each.metadata["kind"] not in (ValueKind.JOB, ValueKind.BATCH)
    )
)
"""The words that the form adds to the line."""
LONGEST_CELL = 2000
"""Characters of arguments and errors; the list shows fewer."""
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What a spreadsheet may take for a formula, at the beginning of a cell; also in full width."""


@dataclass(frozen=True, slots=True)
class JobRow:
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

    rows: list[JobRow]
    page: JobPage


@dataclass(frozen=True, slots=True)
class StatusCounts:
    """How many jobs there are, by tab; tabs that are missing are not counted."""

    jobs: Mapping[str, str]
    counted: LastCount | None


def jobs(request: Request) -> Answer:
    """The jobs of a filter, the newest first or in the order in which they start."""
    line = request.text("q", longest=LONGEST)
    try:
        chosen = Selection.from_line(_with_condition(request, line))
    except OptionError as error:
        return _page(request, Selection(), line, error=str(error))
    if chosen.ids is not None:
        return Done("", to=request.url("job", job_id=chosen.ids[0]))
    _check_arguments(request, chosen)
    return _page(request, chosen, chosen.line)


def _page(request: Request, chosen: Selection, line: str, *, error: str = "") -> Page:
    start, which = _start(request), chosen.which
    current = "" if error else "all"
    if which.statuses:
        current = next((tab for tab in TABS if chosen == chosen.in_state(tab)), "")
    found = counts = None
    if not error:
        found = request.part(
            "the list", lambda session: _read(request, session, chosen, start, LIMIT)
        )
    if not error and not chosen.in_state(None).line:
        counts = request.part("the numbers of jobs", lambda session: _count(request, session))
    tabs = [
        {
            "label": tab.capitalize(),
            "href": request.url("jobs", q=chosen.in_state(tab).line or None),
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
        next_start=None if next_start is None else text_of_start(next_start),
        conditions=CONDITIONS,
        unknown_task="" if which.task in (None, *request.queue.tasks) else which.task,
        actions=[
            action
            for action in ON_JOBS.values()
            if action.button is not None
            and action.button.is_in_lists
            and statuses.intersection(action.statuses)
            and not (action.is_for_later and which.are_due)
            and request.may(action.right)
        ],
        are_waiting=statuses.issubset(WAITING),
        shows_arguments=request.may("view_arguments"),
    )


def jobs_csv(request: Request) -> Download:
    """The first jobs of a filter as CSV."""
    chosen = Selection.from_line(request.text("q", longest=LONGEST))
    if chosen.ids is not None:
        raise Refused("a list of jobs is asked for by a filter, not by an id")
    _check_arguments(request, chosen)
    found = _read(request, request.session, chosen, _start(request), MOST_IN_FILE)
    return Download("jobs.csv", [_csv(found.rows)])


def _csv(rows: list[JobRow]) -> str:
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


def _with_condition(request: Request, line: str) -> str:
    """The line, and what the form adds to it."""
    value = request.text("value", longest=LONGEST).strip()
    if not value:
        return line
    word = request.one_of("word", CONDITIONS, "task")
    if word == "arg.NAME":
        name, _, value = value.partition(":")
        return f"{line} arg.{name.strip()}:{value.strip()}"
    return (
        f"{line} {word}:{value}"
        if word in ("created", "took")
        else f"{line} {word_of(word, value)}"
    )


def _check_arguments(request: Request, chosen: Selection) -> None:
    """Refuse to search for what the user may not see."""
    request.check_filter(chosen)
    try:
        chosen.check_arguments(request.queue.tasks, for_log=False)
    except OptionError as error:
        raise Refused(str(error), 403) from error


def _start(request: Request) -> PageStart | None:
    text = request.text("before")
    try:
        return page_start(text) if text else None
    except ValueError:
        raise Refused(f"before is {text[:40]!r}, which no page has given") from None


def _read(
    request: Request, session: Session, chosen: Selection, start: PageStart | None, limit: int
) -> Rows:
    views = request.queue.views
    page = views.jobs(session, request.scope(chosen), limit=limit, start=start)
    tasks, lines = request.queue.tasks, page.jobs
    if chosen.which.args:  # of an unknown task, all arguments are hidden
        lines = [line for line in lines if line.task in tasks]
    ids = [line.id for line in lines]
    args = views.arguments(session, ids) if request.may("view_arguments") else {}
    holders = views.holders(session, ids)
    rows = [
        JobRow(
            line,
            state_in_words(
                line.status, attempts=line.attempts, run_at=line.run_at, now=request.now
            ),
            _in_one_line(shown_arguments(args[line.id], tasks.get(line.task)))
            if line.id in args
            else None,
            holders.get(line.id),
            redacted(line.last_error or "")[:LONGEST_CELL],
        )
        for line in lines
    ]
    return Rows(rows, page)


def _in_one_line(args: Any) -> str:
    if not isinstance(args, dict):
        return str(args)
    return ", ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in args.items()
    )


def _count(request: Request, session: Session) -> StatusCounts:
    """What an index counts, up to a number; and of queues, what a worker has counted last."""
    found = {}
    for tab in ("running", "failed", "cancelled"):
        jobs = request.scope(Selection().in_state(tab)).count(session, limit=MOST_COUNTED + 1)
        found[tab] = f"{number(MOST_COUNTED)}+" if jobs > MOST_COUNTED else number(jobs)
    latest = None if request.access.tags is not None else request.queue.views.last_count(session)
    if latest is not None:
        seen = request.access.queues
        queues = [count for name, count in latest.queues.items() if seen is None or name in seen]
        found["due"] = number(sum(count.due for count in queues))
        found["blocked"] = number(sum(count.blocked for count in queues))
    return StatusCounts(found, latest)


ROUTES = [Route("/jobs", jobs), Route("/jobs.csv", jobs_csv)]
