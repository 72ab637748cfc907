"""Writes what an enqueue by name has to know of the tasks of the code."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection

from pgqueue.tasks import Task
from pgqueue.tasks.by_name import declare, give_keys
from pgqueue.worker.duty_list import Duty

LOOK_EVERY = 5.0
"""Seconds between two looks for jobs that were enqueued before their tasks were declared."""


class DeclareTasks(Duty):
    """Writes the tasks of the code, and gives the jobs that were enqueued before by their names the
    keys of their limits.

    The looks go on: a transaction whose snapshot is older than the declaration may still enqueue.
    """

    def __init__(self, tasks: Mapping[str, Task[..., Any]], *, notify: bool) -> None:
        super().__init__(repeat_after=LOOK_EVERY)
        self._tasks = dict(tasks)
        self._notify = notify
        self._are_declared = False

    def step(self, connection: Connection) -> float:
        if not self._are_declared:
            with connection.begin():
                declare(connection, self._tasks)
            self._are_declared = True
        with connection.begin():
            may_be_more = give_keys(connection, self._tasks, notify=self._notify)
        return 0.0 if may_be_more else LOOK_EVERY
