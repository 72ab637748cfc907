"""Failed jobs by their error: try one, then requeue the others."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy.orm import Session

from pgqueue.dashboard.routing import Done, Page, Refused, Request, Route
from pgqueue.errors import JobNotFound
from pgqueue.filter_line import LONGEST_MUTE
from pgqueue.models import JobStatus
from pgqueue.operations import Selection
from pgqueue.tasks.showing import masked, without_values
from pgqueue.views import Views
from pgqueue.views.errors import MOST_COUNTED, FailedGroup
from pgqueue.views.jobs import JobLine

SPANS: Mapping[str, timedelta | None] = {
    "1h": timedelta(hours=1),
    "24h": timedelta(hours=24),
    "7d": timedelta(days=7),
    "all": None,
}
DAY, HALF_HOUR = timedelta(hours=24), timedelta(minutes=30)
MOST_GROUPS = 50
ON_A_PAGE = 50


ORDERS = ("newest", "jobs")


def failures(request: Request) -> Page:
    """The errors, those of one kind together, the newest first, or those of the most jobs."""
    span, order = request.one_of("span", SPANS, "24h"), request.one_of("order", ORDERS, "newest")
    jobs, views, is_limited = (
        request.scope(Selection()),
        request.queue.views,
        request.access.is_limited,
    )
    groups = request.part(
        "the list of errors",
        lambda session: views.failures(session, jobs, limit=MOST_GROUPS, since=SPANS[span]),
    )
    if groups and order == "jobs":
        groups = sorted(groups, key=lambda group: -group.jobs)
    trends = groups and request.part(
        "the trend of each error", lambda session: views.trends(session, jobs, groups)
    )
    return Page(
        "failures.html",
        title="Failures",
        command="pgqueue failures" + ("" if SPANS[span] is None else f" --since {span}"),
        groups=groups,
        trends=trends or {},
        span=span,
        spans=SPANS,
        order=order,
        most=MOST_COUNTED,
        is_limited=is_limited,
        line_of=_line_of,
    )


def failure(request: Request, fingerprint: int) -> Page:
    """One kind of error: its newest traceback, its jobs, and the result of a job that was tried."""
    is_limited, task = request.access.is_limited, request.text("task")
    views = request.queue.views
    group = views.failure(request.session, request.scope(Selection()), fingerprint, task)
    if group is None:
        raise Refused("there is no such error: its jobs have ended otherwise, or are deleted", 404)
    jobs = request.scope(_jobs_of(group))
    before = request.whole("before")
    page = request.part(
        "the list of jobs",
        lambda session: views.jobs(session, jobs, limit=ON_A_PAGE, start=before),
    )
    return Page(
        "failure.html",
        title=group.error_type,
        command=f"pgqueue requeue --where '{_line_of(group)}'",
        group=group,
        error=group.newest_error if is_limited else group.newest_error or group.message,
        page=page,
        most=MOST_COUNTED,
        is_limited=is_limited,
        line=_line_of(group),
        tried=_tried(request),
        traceback=_traceback(request, group),
        chart=None
        if is_limited
        else request.part("the chart", lambda session: _chart(views, session, group.task)),
    )


def try_failure(request: Request, fingerprint: int) -> Done:
    """Requeue the newest job of a group, to see whether it succeeds now."""
    task = request.posted("task")
    outcome = request.operator.try_one(request.scope(Selection(task=task, error=fingerprint)))
    if outcome is None or outcome.last is None:
        raise Refused("no job is failed with this error; nothing was changed", 409)
    if not outcome.changed:
        raise Refused(f"nothing was changed: job {outcome.last}", 409)
    job_id = outcome.last.id
    to = request.url("failure", fingerprint=fingerprint, task=task, tried=job_id)
    return Done("", to=to)


def mute_failure(request: Request, fingerprint: int) -> Done:
    """Leave a group out of the lists of problems for some hours; 0 ends it."""
    request.check_sees_all("an error is muted for all jobs")
    task = request.posted("task")
    hours = request.posted_whole("hours", 24, 0, LONGEST_MUTE) or 0
    if not request.operator.mute_error(fingerprint, task, hours=hours):
        raise Refused("there is no such error", 404)
    words = f"muted for {hours} hours" if hours else "not muted any more"
    return Done(f"The error is {words}", to=request.back())


def _jobs_of(group: FailedGroup) -> Selection:
    """The failed jobs of a group."""
    return Selection(status=JobStatus.FAILED, task=group.task, error=group.fingerprint)


def _line_of(group: FailedGroup) -> str:
    """The filter line of these jobs, for the address of an action."""
    return _jobs_of(group).line


def _tried(request: Request) -> JobLine | None:
    """The job that was tried, as it is now."""
    job_id = request.whole("tried")
    if job_id is None:
        return None
    one = request.scope(Selection(after=job_id - 1, before=job_id + 1))
    return next(iter(request.queue.views.jobs(request.session, one, limit=1).jobs), None)


def _traceback(request: Request, group: FailedGroup) -> str | None:
    """Of the newest failed job, or else of the last that has failed so; None if it is deleted, or
    without the right to see it."""
    job_id = group.newest_id
    if job_id is None and not request.access.is_limited:
        job_id = group.job_id
    if job_id is None or not request.may("view_results"):
        return None
    try:
        job = request.part(
            "the traceback", lambda session: request.queue.views.job(session, job_id)
        )
    except JobNotFound:
        return None
    if job is None:
        return None
    task = request.queue.tasks.get(job.columns["task"])
    shown = masked(without_values(job) if task is None else job, task)
    of_group = (one for one in shown.past_attempts[::-1] if one.error_type == group.error_type)
    return next((one.traceback for one in of_group), None)


def _chart(views: Views, session: Session, task: str) -> dict[str, Any]:
    """The failed attempts of a task in the last day, with the deploys."""
    points = views.attempts(session, DAY, HALF_HOUR, task)
    return {
        "times": [point.at for point in points],
        "series": [("failed", "failed", [point.failed + point.retried for point in points])],
        "marks": [(one.first_at, one.version) for one in views.deploys(session, DAY)],
    }


_OF_GROUP = "/failures/<int(signed=True):fingerprint>"
ROUTES = [
    Route("/failures", failures),
    Route(_OF_GROUP, failure),
    Route(f"{_OF_GROUP}/try", try_failure, method="POST", right="requeue"),
    Route(f"{_OF_GROUP}/mute", mute_failure, method="POST", right="requeue"),
]
