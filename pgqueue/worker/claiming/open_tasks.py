"""Which tasks are not paused."""

from collections.abc import Mapping
from typing import Any

from pgqueue.repository import Paused
from pgqueue.statements.tables import array_of
from pgqueue.tasks import Task


def open_tasks(tasks: Mapping[str, Task[..., Any]], paused: Paused) -> str:
    """The names of the tasks that are not paused, as the array parameter of a claim.

    ``tasks`` has each under its name and its aliases; all of them are paused by its name.
    """
    keys = (key for key, task in tasks.items() if not {key, task.name} & set(paused.tasks))
    return array_of(sorted(keys))
