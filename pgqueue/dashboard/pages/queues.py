"""The queues and the limits: how much waits, what goes in and out, and who holds the places."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from pgqueue.dashboard.routing import Asked, Done, Page, Refused, Route
from pgqueue.filter_line import STATUSES, line_of
from pgqueue.models import QueueSettings
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.limits import LimitHolder, Limits, LimitState
from pgqueue.repository.queue_minutes import (
    FirstDue,
    LastCount,
    QueueCount,
    QueueFlow,
    QueueMinutes,
)
from pgqueue.repository.workers import WorkerState
from pgqueue.rules.limits import has_own_capacity, name_of, rate_in_words
from pgqueue.rules.served_queues import is_pattern, serves

MOST_QUEUES = 500
MOST_HOLDERS = 5
NONE = QueueCount(0, 0, 0, 0, None)


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A queue, as the pages show it."""

    name: str
    count: QueueCount
    """Of the last count; zeros for a queue that is not in it."""
    oldest_due: timedelta | None
    """How long the next job to start has been due, now."""
    flow: QueueFlow | None
    workers: int
    """How many live workers serve it."""
    paused_at: datetime | None

    @property
    def line(self) -> str:
        """The filter for its jobs: those that are due, or else those that wait."""
        wait = STATUSES["due"] if self.count.due else STATUSES["pending"]
        return line_of(JobFilter(queue=self.name, **(wait if self.count.waiting else {})))

    @property
    def empty_in(self) -> timedelta | None:
        return self.flow.empty_in(self.count.backlog) if self.flow and self.count.backlog else None

    @property
    def is_growing(self) -> bool:
        return self.flow is not None and self.flow.in_per_minute > 1.05 * self.flow.out_per_minute


@dataclass(frozen=True, slots=True)
class QueueRows:
    """The queues that the user may see, when their jobs were counted last, and all workers."""

    queues: Sequence[QueueRow]
    counted: LastCount | None
    first_due: Sequence[FirstDue]
    workers: Sequence[WorkerState]

    def busiest(self, most: int) -> "QueueRows":
        """Those with the largest backlogs, in the order of their names."""
        first = sorted(self.queues, key=lambda row: (-row.count.backlog, row.name))[:most]
        return replace(self, queues=sorted(first, key=lambda row: row.name))


def read_queues(asked: Asked, session: Session) -> QueueRows:
    """All queues that have or lately had jobs, or that are declared, served or paused."""
    minutes = QueueMinutes(session)
    counted, flows, first_due = minutes.latest(), minutes.flows(), minutes.first_due()
    counts = {} if counted is None else counted.queues
    oldest = {one.queue: one.since for one in reversed(first_due)}
    paused = {row.name: row.paused_at for row in session.scalars(select(QueueSettings))}
    workers = asked.queue.workers(session)
    named = {name for worker in workers for name in worker.queues if not is_pattern(name)}
    declared = {task.settings.queue for task in asked.queue.tasks.values()}
    stopped = {name for name, at in paused.items() if at is not None}
    names = {*counts, *flows, *oldest, *stopped, *named, *declared}
    if asked.access.queues is not None:
        names &= set(asked.access.queues)
    return QueueRows(
        [
            QueueRow(
                name,
                counts.get(name, NONE),
                oldest.get(name),
                flows.get(name),
                sum(serves(worker.queues, name) for worker in workers if worker.is_live),
                paused.get(name),
            )
            for name in sorted(names)
        ],
        counted,
        first_due,
        workers,
    )


@dataclass(frozen=True, slots=True)
class LimitRow:
    """A limit or one of its keys, as the page shows it."""

    state: LimitState
    is_by_key: bool
    """Whether each value of an argument has the capacity, so that the sum of all is no part of it.
    """
    holders: Sequence[LimitHolder]
    has_more: bool
    """Whether more jobs wait than ``state`` says."""

    @property
    def limit(self) -> str:
        return name_of(self.state.name)

    @property
    def key(self) -> str:
        """Of a capacity of one key: its values as JSON, or their digest."""
        return key_in(self.state.name)

    @property
    def is_digest(self) -> bool:
        return self.key.startswith("sha256:")

    @property
    def is_full(self) -> bool:
        return not self.is_by_key and 0 < self.state.capacity <= self.state.held

    def words(self, capacity: int) -> str:
        if not capacity:
            return "paused"
        if not has_own_capacity(capacity, is_fair=self.state.is_fair):
            return "in turns"
        if self.state.period is not None:
            return rate_in_words(capacity, self.state.period)
        return f"{capacity} at once"


def _read_limits(asked: Asked, session: Session) -> list[LimitRow]:
    limits, own = Limits(session), asked.queue.limited.limits
    holders, (states, more) = limits.holders(), limits.at_a_glance()
    found = []
    for state in states:
        fits = [one for one in holders if state.name in (one.key, name_of(one.key))]
        declared = own.get(state.name)
        is_by_key = any(key_in(one.key) for one in fits) if declared is None else bool(declared.by)
        is_sum = is_by_key and not key_in(state.name)
        found.append(LimitRow(state, is_sum, fits[:MOST_HOLDERS], state.name in more))
    return found


def key_in(name: str) -> str:
    """What is behind the name of a limit in one of its keys."""
    return name.partition(" ")[2]


def queues(asked: Asked) -> Page:
    """The queues with their numbers, and the limits with the jobs that hold their places."""
    rows = limits = None
    if asked.access.tags is None:
        rows = asked.part("the queues", partial(read_queues, asked))
    if not asked.access.is_limited:
        limits = asked.part("the limits", partial(_read_limits, asked))
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
    if asked.access.is_limited:
        raise Refused("limits hold for all queues, and you may see only some of the jobs", 403)
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
