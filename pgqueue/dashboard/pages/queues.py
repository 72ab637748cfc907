"""The queues and the limits: how much waits, what goes in and out, and who holds the places."""

import json
from functools import partial
from typing import Any

from sqlalchemy.orm import Session

from pgqueue.dashboard.routing import Asked, Done, Page, Refused, Route
from pgqueue.views import QueueViews

MOST_QUEUES = 500


def read_queues(asked: Asked, session: Session) -> QueueViews:
    """The queues that the user may see."""
    return asked.queue.views.queues(session, asked.access.queues)


def queues(asked: Asked) -> Page:
    """The queues with their numbers, and the limits with the jobs that hold their places."""
    rows = limits = None
    if asked.access.tags is None:
        rows = asked.part("the queues", partial(read_queues, asked))
    if not asked.access.is_limited:
        limits = asked.part("the limits", asked.queue.views.limits)
    name, may_see_keys = asked.text("limit"), asked.may("view_arguments")
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


def pause_queue(asked: Asked) -> Done:
    name = _queue(asked)
    asked.operator.pause_queue(name)
    return Done(f"paused queue {name}: workers skip it within two seconds", to=asked.back())


def resume_queue(asked: Asked) -> Done:
    name = _queue(asked)
    asked.operator.resume_queue(name)
    return Done(f"resumed queue {name}", to=asked.back())


def _queue(asked: Asked) -> str:
    name = asked.posted("queue")
    asked.check_queue(name)
    if asked.access.tags is not None:
        raise Refused("a queue also has jobs that you may not see; nothing was changed", 403)
    return name


def set_limit(asked: Asked) -> Done:
    """Set the capacity of a limit or of one of its keys; empty: that of the code."""
    name, key = _limit(asked)
    written, is_now = asked.operator.set_limit(name, asked.posted_whole("capacity"), key=key)
    return Done(f"the capacity of {written} is {is_now}", to=asked.back())


def pause_key(asked: Asked) -> Done:
    name, key = _limit(asked, needs_key=True)
    written = asked.operator.pause_key(name, key)
    return Done(f"paused {written}: no more of its jobs are admitted", to=asked.back())


def resume_key(asked: Asked) -> Done:
    name, key = _limit(asked, needs_key=True)
    written = asked.operator.resume_key(name, key)
    return Done(f"resumed {written}", to=asked.back())


def _limit(asked: Asked, *, needs_key: bool = False) -> tuple[str, Any]:
    """The limit of the form, and the value of its key: JSON or, if it is none, a text."""
    asked.check_sees_all("limits hold for all queues")
    name, key = asked.posted("limit"), asked.posted("key").strip()
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
