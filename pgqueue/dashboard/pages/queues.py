"""The queues and the limits: how much waits, what goes in and out, and who holds the places."""

import json
from functools import partial
from typing import Any

from sqlalchemy.orm import Session

from pgqueue.checks import ALL_QUEUES
from pgqueue.dashboard.routing import Done, Page, Refused, Request, Route
from pgqueue.views import QueueViews

MOST_QUEUES = 500


def read_queues(request: Request, session: Session) -> QueueViews:
    """The queues that the user may see."""
    return request.queue.views.queues(session, request.access.queues)


def queues(request: Request) -> Page:
    """The queues with their numbers, and the limits with the jobs that hold their places."""
    rows = limits = None
    if request.access.tags is None:
        rows = request.part("the queues", partial(read_queues, request))
    if not request.access.is_limited:
        limits = request.part("the limits", request.queue.views.limits)
    name, may_see_keys = request.text("limit"), request.may("view_arguments")
    return Page(
        "queues.html",
        title="Queues",
        command="pgqueue status",
        rows=None if rows is None else rows.busiest(MOST_QUEUES),
        left=0 if rows is None else max(len(rows.queues) - MOST_QUEUES, 0),
        limits=limits,
        chosen=next(
            (
                row
                for row in limits or ()
                if row.state.name == name and (may_see_keys or not row.key)
            ),
            None,
        ),
    )


def pause_queue(request: Request) -> Done:
    name = _queue(request)
    request.operator.pause_queue(name)
    words = f"paused {_in_words(name)}: workers notice it within two seconds"
    return Done(words, to=request.back())


def resume_queue(request: Request) -> Done:
    name = _queue(request)
    request.operator.resume_queue(name)
    return Done(f"resumed {_in_words(name)}", to=request.back())


def _queue(request: Request) -> str:
    name = request.posted("queue")
    request.check_queue(name)
    if request.access.tags is not None:
        raise Refused("a queue also has jobs that you may not see; nothing was changed", 403)
    return name


def _in_words(name: str) -> str:
    return "all queues" if name == ALL_QUEUES else f"queue {name}"


def set_limit(request: Request) -> Done:
    """Set the capacity of a limit or of one of its keys; empty: that of the code."""
    name, key = _limit(request)
    written, is_now = request.operator.set_limit(name, request.posted_whole("capacity"), key=key)
    return Done(f"the capacity of {written} is {is_now}", to=request.back())


def pause_key(request: Request) -> Done:
    name, key = _limit(request, needs_key=True)
    written = request.operator.pause_key(name, key)
    return Done(f"paused {written}: no more of its jobs are admitted", to=request.back())


def resume_key(request: Request) -> Done:
    name, key = _limit(request, needs_key=True)
    written = request.operator.resume_key(name, key)
    return Done(f"resumed {written}", to=request.back())


def _limit(request: Request, *, needs_key: bool = False) -> tuple[str, Any]:
    """The limit of the form, and the value of its key: JSON or, if it is none, a text."""
    request.check_sees_all("limits hold for all queues")
    name, key = request.posted("limit"), request.posted("key").strip()
    if needs_key and not key:
        raise Refused("which key? give the value of the limit's argument, as JSON")
    try:
        value = json.loads(key) if key else None
    except (ValueError, RecursionError):
        value = key
    return name, (None,) if key and value is None else value


ROUTES = [
    Route("/queues", queues),
    Route("/queues/pause", pause_queue, method="POST", right="pause"),
    Route("/queues/resume", resume_queue, method="POST", right="pause"),
    Route("/queues/limit", set_limit, method="POST", right="limits"),
    Route("/queues/pause-key", pause_key, method="POST", right="pause"),
    Route("/queues/resume-key", resume_key, method="POST", right="pause"),
]
