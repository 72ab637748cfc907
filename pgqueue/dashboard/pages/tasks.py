"""The tasks: how often each ran and failed, how long it ran and waited, and what time it used."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from shlex import quote
from typing import NamedTuple

from sqlalchemy.orm import Session

from pgqueue.dashboard.routing import Done, Page, Refused, Request, Route
from pgqueue.operations import Selection
from pgqueue.rules.histogram import least
from pgqueue.views.errors import Deployed, Failures
from pgqueue.views.tasks import AttemptPoint, TaskStatistics, TaskView

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
SPANS = {
    "hour": (HOUR, timedelta(minutes=1)),
    "day": (DAY, timedelta(minutes=10)),
    "week": (timedelta(days=7), HOUR),
}
"""The times of charts, each with the size of its parts."""
MOST_TASKS = 500
IN_ALL_QUEUES = "tasks run in all queues"


def tasks(request: Request) -> Page:
    """All tasks, with the attempts that have ended within a time."""
    span = request.one_of("span", SPANS, "hour")
    rows = None
    if not request.access.is_limited:
        rows = request.part(
            "the tasks", lambda session: request.queue.views.tasks(session, SPANS[span][0])
        )
    since = {"hour": "1h", "day": "1d", "week": "7d"}[span]
    command = f"pgqueue stats --since {since}"
    return Page(
        "tasks.html",
        title="Tasks",
        rows=None if rows is None else rows[:MOST_TASKS],
        left=0 if rows is None else max(len(rows) - MOST_TASKS, 0),
        span=span,
        spans=SPANS,
        command=command,
    )


class Bar(NamedTuple):
    """A bucket of a histogram."""

    least: timedelta
    most: timedelta
    ran: int
    waited: int


@dataclass(frozen=True, slots=True)
class OneTask:
    """What the page of one task shows."""

    row: TaskView | None
    bars: Sequence[Bar]
    points: Sequence[AttemptPoint]
    deploys: Sequence[Deployed]
    failures: Sequence[Failures]


def _read_task(request: Request, name: str, span: str, session: Session) -> OneTask:
    within, size = SPANS[span]
    views = request.queue.views
    row = next(iter(views.tasks(session, within, name)), None)
    return OneTask(
        row,
        bars_of(row.ended if row else None),
        views.attempts(session, within, size, name),
        views.deploys(session, within),
        views.errors(session, limit=10, task=name, since=within),
    )


def bars_of(ended: TaskStatistics | None) -> list[Bar]:
    """The histogram from the first bucket that is not empty to the last."""
    if ended is None:
        return []
    bars = [
        Bar(least(bucket), least(bucket + 1), ran, waited)
        for bucket, (ran, waited) in enumerate(zip(ended.ran, ended.waited, strict=True))
    ]
    filled = [number for number, bar in enumerate(bars) if bar.ran or bar.waited]
    return bars[filled[0] : filled[-1] + 1] if filled else []


def task(request: Request, name: str) -> Page:
    """One task: its attempts in a chart with the deploys, its durations, and its errors."""
    request.check_sees_all(IN_ALL_QUEUES)
    span = request.one_of("span", SPANS, "hour")
    one = request.part("the task", partial(_read_task, request, name, span))
    if one is not None and one.row is None and not one.failures:
        raise Refused(f"there is no task {name!r}", 404)
    command = f"pgqueue stats --task {quote(name)}"
    return Page(
        "task.html",
        title=name,
        command=command,
        one=one,
        name=name,
        line=Selection(task=name).line,
        span=span,
        spans=SPANS,
    )


def pause_task(request: Request) -> Done:
    name = _task(request)
    request.operator.pause_task(name)
    return Done(f"paused task {name}: workers skip its jobs within two seconds", to=request.back())


def resume_task(request: Request) -> Done:
    name = _task(request)
    request.operator.resume_task(name)
    return Done(f"resumed task {name}", to=request.back())


def _task(request: Request) -> str:
    request.check_sees_all(IN_ALL_QUEUES)
    return request.posted("task")


ROUTES = [
    Route("/tasks", tasks),
    Route("/tasks/<task:name>", task),
    Route("/tasks/pause", pause_task, method="POST", right="pause"),
    Route("/tasks/resume", resume_task, method="POST", right="pause"),
]
