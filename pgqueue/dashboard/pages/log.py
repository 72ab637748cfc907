"""The log of operators: who has done what, to how many jobs, and what is not finished."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from pgqueue.dashboard.rendering import clock_time, number, span, visible
from pgqueue.dashboard.routing import Page, Refused, Request, Route
from pgqueue.errors import OptionError
from pgqueue.filter_line import line_of
from pgqueue.models import JobStatus
from pgqueue.operations import Selection
from pgqueue.operations.acting import why_not_resumable
from pgqueue.operations.actions import ACTIONS, BUTTONS, ON_JOBS
from pgqueue.operations.results import Result
from pgqueue.views.log import LogEntry, error_of, target_in_words

LONGEST_SPREAD = 1e9
"""Seconds; a hand has written a longer one."""
ON_A_PAGE = 50
SHOWN = 5
"""Of the jobs that a request has skipped, how many are named with the reason."""


def log(request: Request) -> Page:
    """The newest actions; a user who sees only some of the jobs sees their own actions."""
    actor = request.access.user if request.access.is_limited else request.text("actor")
    action, before = request.text("action"), request.whole("before")
    unfinished = request.one_of("unfinished", ("yes", "no"), "no") == "yes"
    found = request.part(
        "the log",
        lambda session: request.queue.views.log(
            session,
            limit=ON_A_PAGE + 1,
            actor=actor or None,
            action=action or None,
            before=before,
            unfinished=unfinished,
        ),
    )
    has_more = found is not None and len(found) > ON_A_PAGE
    shown = found and found[:ON_A_PAGE]
    return Page(
        "log.html",
        title="Log",
        command="pgqueue log --unfinished" if unfinished else "pgqueue log",
        actions=shown,
        older=shown[-1].id if shown and has_more else None,
        actor=actor,
        action=action,
        actions_known=[
            ("", "all"),
            *((one, visible(one.replace("_", " "))) for one in sorted({*ACTIONS, action}) if one),
        ],
        is_unfinished=unfinished,
        is_limited=request.access.is_limited,
        target_in_words=partial(_target, request),
        errors=errors_of(request, map(error_of, shown or ())),
        error_of=error_of,
        endpoint_of=lambda action: _endpoint(request, action),
    )


def log_entry(request: Request, action_id: int) -> Page:
    """One action."""
    action = request.queue.views.log_entry(request.session, action_id)
    if action is None or (request.access.is_limited and action.actor != request.access.user):
        raise Refused(f"there is no action {action_id}; actions are kept for 90 days", 404)
    return entry(request, action)


def entry(
    request: Request, action: LogEntry, *, is_working: bool = False, left: Sequence[Result] = ()
) -> Page:
    """The page of an action.

    ``is_working``: this request has done a part of it, and the page goes on by itself.  ``left``:
    the jobs that the request has skipped.
    """
    fingerprint = error_of(action)
    return Page(
        "log_entry.html",
        title=f"{action.action.replace('_', ' ').capitalize()}, action {action.id}",
        command=f"pgqueue log --before {(action.id or 0) + 1} --limit 1",
        action=action,
        target=_target(request, action),
        line=_line(request, action),
        error=errors_of(request, [fingerprint]).get(fingerprint),
        options=options_in_words(action),
        of=_of(action),
        doing=ON_JOBS[action.action].doing if action.action in ON_JOBS else "Doing",
        ended=ended_in_words(action),
        waiting=_waiting(action),
        runs_again=_runs_again(action),
        endpoint=_endpoint(request, action),
        is_working=is_working,
        left=left[:SHOWN],
    )


def ended_in_words(action: LogEntry) -> str:
    """What an action on jobs that has ended has done; jobs that are spread are still to come."""
    if action.action not in ON_JOBS or not {"jobs", "filter"} & {*action.target}:
        return ""
    jobs = "job" if action.jobs == 1 else "jobs"
    words = f"{number(action.jobs)} {jobs} {ON_JOBS[action.action].done}"
    if action.jobs and (spread := _spread(action)):
        words += f", spread over {span(spread)}: due from {clock_time(action.at)} to "
        words += f"{clock_time(action.at + spread)} UTC"
    return words


def _spread(action: LogEntry) -> timedelta | None:
    seconds = action.options.get("spread_s")
    if isinstance(seconds, int | float) and 0 <= seconds < LONGEST_SPREAD:
        return timedelta(seconds=seconds)
    return None


def _of(action: LogEntry) -> int | None:
    """How many jobs an action is on, as they were counted before it; None if they were not."""
    if isinstance(action.target.get("jobs"), list):
        return len(action.target["jobs"])
    of = action.options.get("of")
    return of if isinstance(of, int) else None


def _waiting(action: LogEntry) -> str:
    """The filter for the jobs that wait, of the task and the queue of jobs that run again."""
    if not _runs_again(action) or "filter" not in action.target:
        return ""
    try:
        which = Selection.from_target(action.target).which
    except OptionError:  # code of another version has written it
        return ""
    waits = Selection(status=JobStatus.PENDING).also(task=which.task, queue=which.queue)
    return waits.line if which.task or which.queue else ""


def _runs_again(action: LogEntry) -> bool:
    return action.action in ON_JOBS and ON_JOBS[action.action].runs_again


def options_in_words(action: LogEntry) -> str:
    """How an action was done."""
    options, words = dict(action.options), []
    of, spread = options.pop("of", None), _spread(action)
    if spread is not None:
        del options["spread_s"]
        jobs = f"{number(of)} jobs " if isinstance(of, int) else ""
        words.append(f"{jobs}spread over {span(spread)}")
    for name, value in options.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        words.append(f"{name.replace('_', ' ')}: {text}")
    return "; ".join(words)


def errors_of(request: Request, fingerprints: Iterable[int | None]) -> Mapping[Any, str]:
    """The types of errors, by which filters choose jobs; none for a user who sees some of the jobs:
    an error may be that of others only."""
    wanted = {one for one in fingerprints if one is not None}
    if not wanted or request.access.is_limited:
        return {}
    found = request.part(
        "the errors", lambda session: request.queue.views.error_types(session, wanted)
    )
    return found or {}


def _target(request: Request, action: LogEntry) -> str:
    return target_in_words(action, show_arguments=request.may("view_arguments"))


def _line(request: Request, action: LogEntry) -> str:
    """The filter of an action, for a link; empty without one that the user may search by."""
    if "filter" not in action.target:
        return ""
    try:
        which = Selection.from_target(action.target).which
    except OptionError:  # code of another version has written it
        return ""
    may_search = request.may("view_arguments") or not which.names_arguments
    return line_of(which) if may_search else ""


def _endpoint(request: Request, action: LogEntry) -> str | None:
    """Where the user can go on with an action; None if it is finished, or without the right."""
    if why_not_resumable(action):
        return None
    right = ON_JOBS[action.action].right
    return f"act_{right}" if request.may(right) and action.action in BUTTONS else None


ROUTES = [Route("/log", log), Route("/log/<int:action_id>", log_entry)]
