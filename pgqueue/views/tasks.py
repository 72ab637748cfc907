"""The tasks: how often each ran, and what time it used."""

from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import Connection

from pgqueue.operations import Operations
from pgqueue.repository.pauses import Pauses
from pgqueue.repository.task_minutes import KEPT as KEPT
from pgqueue.repository.task_minutes import AttemptPoint as AttemptPoint
from pgqueue.repository.task_minutes import TaskMinutes
from pgqueue.repository.task_minutes import TaskStatistics as TaskStatistics


class TaskView(NamedTuple):
    """A task, with the attempts that have ended within a time."""

    name: str
    ended: TaskStatistics | None
    """None if no attempt has ended in the time."""
    share: float
    """Of the time that all tasks have used, as a part of 1."""
    paused_at: datetime | None
    is_known: bool
    """Whether this application has the task."""


def read_tasks(
    queue: Operations, connection: Connection, since: timedelta, name: str | None
) -> list[TaskView]:
    """The tasks that ran, that this application has, or that are paused; the busiest first."""
    ended = {one.task: one for one in TaskMinutes(connection).since(since, name)}
    paused = {task: at for task, at in Pauses(connection).tasks().items() if name in (None, task)}
    used = {task: one.time_used.total_seconds() for task, one in ended.items()}
    whole = sum(used.values()) or 1.0
    known = {task for task in queue.tasks if name in (None, task)}
    found = [
        TaskView(
            task, ended.get(task), used.get(task, 0.0) / whole, paused.get(task), task in known
        )
        for task in {*ended, *paused, *known}
    ]
    return sorted(found, key=lambda row: (-row.share, row.ended is None, row.name))
