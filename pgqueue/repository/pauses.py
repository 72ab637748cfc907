"""Pauses of queues and tasks, and what is paused since when."""

from datetime import datetime
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.repository.reading import moment
from pgqueue.repository.tables import (
    Executor,
    clock,
    paused_tasks,
    queues,
    schedules,
    text_parameter,
)


@cache
def pause_queue() -> sa.Executable:
    row = pg_insert(queues).values(name=sa.bindparam("name", type_=sa.Text), paused_at=clock())
    kept = sa.func.coalesce(queues.c.paused_at, row.excluded.paused_at)
    return row.on_conflict_do_update(index_elements=[queues.c.name], set_={"paused_at": kept})


@cache
def resume_queue() -> sa.Executable:
    name = text_parameter("queue_name")
    return sa.update(queues).where(queues.c.name == name).values(paused_at=sa.null())


@cache
def pause_task() -> sa.Executable:
    row = pg_insert(paused_tasks).values(task=text_parameter("task"))
    return row.on_conflict_do_nothing()


@cache
def resume_task() -> sa.Executable:
    return sa.delete(paused_tasks).where(paused_tasks.c.task == text_parameter("paused_task"))


def paused(table: sa.Table, *, limit: int | None = None) -> sa.Executable:
    """The paused queues, tasks or schedules, in the order of their names."""
    name = table.c.task if table is paused_tasks else table.c.name
    return (
        sa.select(name, moment(table.c.paused_at))
        .where(table.c.paused_at.is_not(None))
        .order_by(name)
        .limit(limit)
    )


class Pauses:
    """The pauses behind one Session or Connection.

    ``queues``, ``tasks`` and ``schedules`` return the names of what is paused, with the times.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def pause_queue(self, name: str) -> None:
        self._executor.execute(pause_queue(), {"name": name})

    def resume_queue(self, name: str) -> None:
        self._executor.execute(resume_queue(), {"queue_name": name})

    def pause_task(self, name: str) -> None:
        self._executor.execute(pause_task(), {"task": name})

    def resume_task(self, name: str) -> None:
        self._executor.execute(resume_task(), {"paused_task": name})

    def queues(self) -> dict[str, datetime]:
        return self._read(paused(queues))

    def tasks(self, *, limit: int | None = None) -> dict[str, datetime]:
        return self._read(paused(paused_tasks, limit=limit))

    def schedules(self, *, limit: int) -> dict[str, datetime]:
        return self._read(paused(schedules, limit=limit))

    def _read(self, statement: Any) -> dict[str, datetime]:
        return {row[0]: row[1] for row in self._executor.execute(statement)}
