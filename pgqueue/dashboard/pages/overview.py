"""The first page: what needs attention, how much is done and waits, and what takes the time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy.orm import Session

from pgqueue.checks import ALL_QUEUES
from pgqueue.dashboard.pages.queues import read_queues
from pgqueue.dashboard.pages.tasks import HOUR, SPANS
from pgqueue.dashboard.routing import Page, Request, Route
from pgqueue.operations import Selection
from pgqueue.operations.actions import ACTIONS
from pgqueue.views import QueueView, QueueViews
from pgqueue.views.errors import MOST_COUNTED, Deployed
from pgqueue.views.findings import Level, at_a_glance
from pgqueue.views.queues import DepthPoint, WorkerState
from pgqueue.views.tasks import AttemptPoint
from pgqueue.views.words import jobs_wait

LATELY = HOUR
"""How new the last error of a group is that needs attention."""
NEWEST, MOST_GROUPS = 10, 5
"""Of so many groups with the newest errors, those with the most failed jobs are shown."""
MOST_TASKS = MOST_QUEUES = 10
MOST_PAUSED = 10

PAGE_OF = {
    "workers": ("workers", "Workers"),
    "unknown task": ("jobs", "Its jobs"),
    "schedules": ("schedules", "Schedules"),
    "batches": ("batches", "Batches"),
    "unreadable jobs": ("jobs", "Jobs"),
}
"""By the subject of a finding, the page that helps, and the words of its link."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that needs attention, and the remedy: a link, or a button that needs a right."""

    status: str
    """The status whose shape and colour it has."""
    what: str
    words: str
    endpoint: str = ""
    label: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Of the address, or with ``right`` the fields of the form."""
    right: str = ""


def needs(request: Request, rows: QueueViews | None, session: Session) -> list[Problem]:
    """What needs attention; of a user who sees some queues, only what is in them."""
    found = list(_failures(request, session))
    if rows is None:
        return found
    if (at := rows.all_paused_at) is not None:
        found.append(_paused("queue", ALL_QUEUES, at, "; this stands for all queues"))
    found += _paused_queues(rows.queues)
    if request.access.is_limited:
        return found
    found += _paused_tasks(request, session)
    found += _paused_schedules(request, session)
    glance = at_a_glance(
        request.queue, session, count=rows.counted, first=rows.first_due, workers=rows.workers
    )
    for finding in glance:
        endpoint, label = PAGE_OF.get(finding.subject, ("", ""))
        values = {"q": Selection(task=finding.task).line} if finding.task else {}
        status = "failed" if finding.level is Level.WRONG else "pending"
        need = Problem(status, finding.subject, finding.detail, endpoint, label, values)
        # That no worker lives stands first: it is why most of the others wait.
        found.insert(0 if finding.level is Level.WRONG else len(found), need)
    return found


def _failures(request: Request, session: Session) -> Iterator[Problem]:
    """The errors with the most failed jobs, of the newest ones that are not muted."""
    is_limited = request.access.is_limited
    seen = request.scope(Selection())
    groups = request.queue.views.failures(session, seen, limit=NEWEST, since=LATELY)
    shown = [
        group
        for group in groups
        if group.jobs and (group.muted_until is None or group.muted_until < request.now)
    ]
    for group in sorted(shown, key=lambda group: -group.jobs)[:MOST_GROUPS]:
        jobs = "1 job" if group.jobs == 1 else f"{min(group.jobs, MOST_COUNTED):,} jobs"
        more = "over " if group.jobs > MOST_COUNTED else ""
        deploy = f", after deploy {group.first_version}" if group.first_version else ""
        # The message may be that of a job that the user may not see.
        message = "" if is_limited else group.message.partition("\n")[0]
        error = f"{group.error_type}: {message}".rstrip(": ")
        words = f"failed since {group.first_at:%d %b %H:%M} UTC{deploy}: {error}"
        place = {"fingerprint": group.fingerprint, "task": group.task}
        yield Problem("failed", f"{more}{jobs} of {group.task}", words, "failure", "Look", place)


def _paused_queues(queues: Sequence[QueueView]) -> Iterator[Problem]:
    """Those in which jobs wait."""
    for row in queues:
        if row.paused_at is not None and row.count.backlog:
            yield _paused("queue", row.name, row.paused_at, f"; {jobs_wait(row.count.backlog)}")


def _paused_tasks(request: Request, session: Session) -> Iterator[Problem]:
    rows = request.queue.views.paused_tasks(session, limit=MOST_PAUSED + 1)
    yield from (_paused("task", name, at) for name, at in rows[:MOST_PAUSED])
    if len(rows) > MOST_PAUSED:
        yield Problem("blocked", "more tasks", "are paused, too", "tasks", "Tasks")


def _paused_schedules(request: Request, session: Session) -> Iterator[Problem]:
    """No job that waits shows that a schedule is paused, which a worker does too."""
    rows = request.queue.views.paused_schedules(session, limit=MOST_PAUSED + 1)
    more = ", and enqueues no job"
    yield from (_paused("schedule", name, at, more) for name, at in rows[:MOST_PAUSED])
    if len(rows) > MOST_PAUSED:
        yield Problem("blocked", "more schedules", "are paused, too", "schedules", "Schedules")


def _paused(kind: str, name: str, at: datetime, more: str = "") -> Problem:
    """Something that is paused, and the button that resumes it."""
    resume = ACTIONS[f"resume_{kind}"]
    words = f"is paused since {at:%d %b %H:%M} UTC{more}"
    return Problem(
        "blocked", f"{kind} {name}", words, resume.name, "Resume", {kind: name}, resume.right
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """What the figures and charts show; of all tasks and queues, or of those of the user."""

    points: Sequence[AttemptPoint]
    """Empty for a user who sees only some of the jobs."""
    deploys: Sequence[Deployed]
    depths: Sequence[DepthPoint]
    done: int
    """Attempts that have succeeded in the last hour."""
    done_before: int
    """In the hour before it."""
    failed: int

    @property
    def change(self) -> str:
        """How many more have succeeded than in the hour before, in words."""
        if not self.done_before:
            return "none in the hour before"
        return (
            f"{100 * (self.done - self.done_before) / self.done_before:+.0f} % to the hour before"
        )


def _figures(request: Request, span: str, session: Session) -> Figures:
    within, size = SPANS[span]
    views = request.queue.views
    depths = views.depths(session, within, size, request.access.queues)
    if request.access.is_limited:
        return Figures((), (), depths, 0, 0, 0)
    by_minute = views.attempts(session, 2 * HOUR, HOUR / 60)
    before, last = by_minute[:-60], by_minute[-60:]
    return Figures(
        last if within == HOUR else views.attempts(session, within, size),
        views.deploys(session, within),
        depths,
        sum(point.succeeded for point in last),
        sum(point.succeeded for point in before),
        sum(point.failed for point in last),
    )


def _slots(workers: Sequence[WorkerState]) -> tuple[int, int, int]:
    """How many slots of live workers are in use, how many there are, and how many workers."""
    live = [worker for worker in workers if worker.is_live]
    busy = sum(min(len(worker.jobs), worker.slots) for worker in live)
    return busy, sum(worker.slots for worker in live), len(live)


def overview(request: Request) -> Page:
    """What needs attention, in figures, charts and tables."""
    span = request.one_of("span", SPANS, "hour")
    rows = tasks = slots = None
    if request.access.tags is None:
        rows = request.part("the queues", partial(read_queues, request))
        figures = request.part("the charts", partial(_figures, request, span))
    else:
        figures = None
    if not request.access.is_limited:
        tasks = request.part("the tasks", lambda session: request.queue.views.tasks(session, HOUR))
        slots = None if rows is None else _slots(rows.workers)
    ages = [row.oldest_due for row in rows.queues if row.oldest_due] if rows else []
    return Page(
        "overview.html",
        title="Overview",
        command="pgqueue doctor",
        needs=request.part("what needs attention", partial(needs, request, rows)),
        rows=None if rows is None else rows.busiest(MOST_QUEUES),
        oldest=max(ages, default=None),
        figures=figures,
        tasks=None if tasks is None else [row for row in tasks if row.ended][:MOST_TASKS],
        slots=slots,
        span=span,
        spans=SPANS,
    )


ROUTES = [Route("/", overview)]
