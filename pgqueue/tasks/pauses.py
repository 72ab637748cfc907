"""Paused tasks under all of their names."""

from collections.abc import Mapping
from typing import Any

from pgqueue.repository.tables import array_of
from pgqueue.repository.workers import Paused
from pgqueue.tasks.task import Task


def open_tasks(tasks: Mapping[str, Task[..., Any]], paused: Paused) -> str:
    """The names of the tasks that are not paused, as the array parameter of a claim.

    ``tasks`` has each under its name and its aliases.
    """
    return array_of(sorted(tasks.keys() - set(under_all_names(tasks, paused).tasks)))


def under_all_names(tasks: Mapping[str, Task[..., Any]], paused: Paused) -> Paused:
    """Add the aliases of paused tasks: a task is paused by its name."""
    aliases = {key for key, task in tasks.items() if task.name in paused.tasks}
    return Paused(paused.queues, aliases.union(paused.tasks))
