"""Enqueues jobs by the names of their tasks, whose code this application may not have; and writes
what that has to know of the tasks."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import datetime, timedelta
from typing import Any, TypedDict

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from pgqueue.database.autocommit import in_autocommit
from pgqueue.database.callers import caller, joined, may_notify, translated_errors
from pgqueue.database.collecting import Collecting, collecting_of
from pgqueue.database.sqlstates import sqlstate_of
from pgqueue.database.uncommitted import note_enqueued
from pgqueue.errors import ArgumentsError, DuplicateJob, OptionError, UnknownTask
from pgqueue.options import Options
from pgqueue.repository.declared_tasks import (
    DUPLICATE_JOB,
    UNKNOWN_TASK,
    WRONG_VALUE,
    DeclaredTasks,
)
from pgqueue.tasks.task import Task

ERRORS = {UNKNOWN_TASK: UnknownTask, WRONG_VALUE: OptionError, DUPLICATE_JOB: DuplicateJob}


class OptionsByName(TypedDict, total=False):
    """The options of an enqueue by name, for type checkers."""

    queue: str
    priority: int
    max_attempts: int
    run_at: datetime
    delay: timedelta
    unique_key: str
    meta: Mapping[str, Any]
    tags: list[str]


def enqueue_by_name(
    session: Any, task: str, args: Mapping[str, Any], options: OptionsByName, *, notify: bool
) -> int:
    where = f"task {task}: "
    target = caller(session, f"task {task}")
    checked = Options.of_task(task, {}).of_job(options)
    if wrong := sorted(options.keys() - OptionsByName.__annotations__.keys()):
        raise OptionError(f"{where}an enqueue by name takes no {', '.join(wrong)}; omit it")
    if not isinstance(options.get("unique_key", ""), str):
        raise OptionError(f"{where}unique_key of an enqueue by name is a str")
    try:
        stored = json.dumps(dict(args), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ArgumentsError(
            f"{where}the arguments of an enqueue by name are a dict of JSON data: {error}; give "
            "them in their stored form, a date for example as its ISO text"
        ) from error
    connection = joined(target, f"task {task}")
    collecting = collecting_of(target) or Collecting({})
    if collecting.meta or collecting.after:
        raise OptionError(
            f"{where}the block of a batch or workflow takes no enqueue by name; give a task of "
            "this application"
        )
    values: dict[str, Any] = dict.fromkeys(OptionsByName.__annotations__)
    values |= options | {"task": task, "args": stored}
    values["meta"] = json.dumps(checked.meta) if checked.meta else None
    values["tags"] = json.dumps(checked.tags) if checked.tags else None
    values["notify"] = notify and may_notify(connection)
    # An error of the function leaves the caller's transaction usable.
    is_alone = in_autocommit(connection)
    try:
        with translated_errors(), nullcontext() if is_alone else connection.begin_nested():
            job_id = DeclaredTasks(connection).enqueue(values)
    except DBAPIError as error:
        if (kind := ERRORS.get(sqlstate_of(error) or "")) is None:
            raise
        raise kind(str(error.orig).splitlines()[0]) from error
    note_enqueued(target, task, [job_id], may_be_lost=not is_alone)
    return job_id


def declare(connection: Connection, tasks: Mapping[str, Task[..., Any]]) -> None:
    """Write what an enqueue by name has to know of these tasks."""
    declarations = {name: task.declaration() for name, task in tasks.items()}
    DeclaredTasks(connection).declare(declarations)


def give_keys(connection: Connection, tasks: Mapping[str, Task[..., Any]], *, notify: bool) -> bool:
    """Give the next jobs that were enqueued before these tasks were declared the keys of their
    limits; returns whether there were any."""

    def keys_of(task: str, queue: str, args: str, meta: str | None) -> str | None:
        return tasks[task].limit_keys_of(queue, args, meta)

    return DeclaredTasks(connection).give_keys(keys_of, tasks, notify=notify)
