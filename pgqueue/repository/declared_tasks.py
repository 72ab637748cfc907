"""The tasks that workers know, and the function by which a job is enqueued by the name of its task.

The function is in the tables' schema: see ``alembic/versions``.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.models import SCHEMA
from pgqueue.repository.messages import columns_for, dispatch_of_each
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    POSITION,
    Executor,
    array_of,
    array_parameter,
    clock,
    declared_tasks,
    document,
    jobs,
    json_parameter,
    text_parameter,
    waiting_messages,
    wake_up_call,
)
from pgqueue.rules.limits import UNDECLARED

UNKNOWN_TASK = "PQ001"
WRONG_VALUE = "PQ002"
DUPLICATE_JOB = "PQ003"
"""The SQLSTATEs of the function's errors."""

BY_NAME = "pgqueue.by_name"
"""The key, in the meta of a job, that says so: nobody has checked its arguments yet."""
PORTION = 500
"""Undeclared jobs in one transaction."""


@cache
def declare_tasks() -> sa.Executable:
    """Write the tasks of a worker's code, if they differ from those in the table."""
    columns = (sa.column("name", sa.Text), sa.column("declaration", JSONB))
    given = document("given", *columns)
    rows = sa.select(given.c.name, given.c.declaration).order_by(given.c.name)
    new = pg_insert(declared_tasks).from_select(["name", "declaration"], rows)
    declaration = new.excluded.declaration
    return new.on_conflict_do_update(
        index_elements=[declared_tasks.c.name],
        set_={"declaration": declaration},
        where=declared_tasks.c.declaration != declaration,
    )


@cache
def lock_undeclared_jobs() -> sa.Executable:
    """Lock the next jobs under these keys, of tasks that were not declared at their enqueue."""
    waiting, values = waiting_messages, (jobs.c.args, jobs.c.meta)
    job = (
        sa.select(
            jobs.c.id, jobs.c.task, jobs.c.queue, *(sa.cast(each, sa.Text) for each in values)
        )
        .where(jobs.c.id == waiting.c.target_id, jobs.c.outcome.is_(None))
        .offset(AS_IT_STANDS)  # by key: `jobs` is not hashed for some rows
        .with_for_update(key_share=True, skip_locked=True)
        .lateral("job")
    )
    return (
        sa.select(job)
        .join_from(waiting, job, sa.true())
        .where(waiting.c.limit_keys == sa.any_(array_parameter("keys", sa.Text)))
        .limit(PORTION)
    )


@cache
def give_keys(*, notify: bool) -> sa.Executable:
    """Put locked jobs under the limits of their tasks, or give them their messages."""
    given = document("given", sa.column("id", sa.BigInteger), sa.column("limit_keys", sa.Text))
    waiting = waiting_messages
    key = ("limit_keys", *POSITION)
    stands = (
        sa.select(*(jobs.c[name] for name in key))
        .where(jobs.c.id == given.c.id)
        .offset(AS_IT_STANDS)
        .lateral("stands")
    )
    taken = (
        sa.delete(waiting)
        .where(
            waiting.c.target_id == given.c.id,
            *(waiting.c[name] == stands.c[name] for name in key),
        )
        .returning(waiting.c.target_id, given.c.limit_keys)
        .cte("taken")
    )
    job = (
        sa.update(jobs)
        .where(jobs.c.id == taken.c.target_id)
        .values(limit_keys=taken.c.limit_keys, run_at=sa.func.greatest(jobs.c.run_at, clock()))
        .returning(*columns_for(limited=True))
        .cte("job")
    )
    woken = wake_up_call() if notify else sa.true()
    return sa.select(woken).add_cte(*dispatch_of_each(job, limited=True, after=False))


@cache
def enqueue_by_name() -> sa.Executable:
    """Call the function."""
    given: dict[str, Any] = {
        "priority": sa.Integer,
        "max_attempts": sa.Integer,
        "run_at": sa.DateTime(timezone=True),
        "delay": sa.Interval,
    }
    values = [
        *(text_parameter(name) for name in ("task", "queue", "unique_key")),
        *(json_parameter(name) for name in ("args", "meta", "tags")),
        *(sa.cast(sa.bindparam(name, type_=type_), type_) for name, type_ in given.items()),
        sa.cast(sa.bindparam("notify", type_=sa.Boolean), sa.Boolean),
    ]
    names = ("task", "queue", "unique_key", "args", "meta", "tags", *given, "notify")
    called = getattr(sa.func, SCHEMA).enqueue(
        *(
            sa.literal_column(name).op("=>")(value)
            for name, value in zip(names, values, strict=True)
        )
    )
    return sa.select(called)


class DeclaredTasks:
    """The tasks behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def declare(self, declarations: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the tasks of the code, by their names."""
        rows = [{"name": name, "declaration": one} for name, one in declarations.items()]
        self._executor.execute(declare_tasks(), {"given": json.dumps(rows)})

    def enqueue(self, values: Mapping[str, Any]) -> int:
        """Enqueue a job; returns its id, or that of the job that holds its unique key."""
        job_id: int = self._executor.execute(enqueue_by_name(), values).scalar_one()
        return job_id

    def give_keys(
        self,
        keys_of: Callable[[str, str, str, str | None], str | None],
        tasks: Iterable[str],
        *,
        notify: bool,
    ) -> bool:
        """Give the next jobs that were enqueued before these tasks were declared the keys of their
        limits, from their task, queue, arguments and meta; returns whether there were any."""
        keys = array_of(f"{UNDECLARED} {task}" for task in tasks)
        found = self._executor.execute(lock_undeclared_jobs(), {"keys": keys}).all()
        if found:
            rows = [{"id": id, "limit_keys": keys_of(*names)} for id, *names in found]
            self._executor.execute(give_keys(notify=notify), {"given": json.dumps(rows)})
        return bool(found)
