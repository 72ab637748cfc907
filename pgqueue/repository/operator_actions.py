"""The log of operators: who has done what, and how far an action on many jobs has come.

A row is written in the transaction of the change.  An action on many jobs works in several
transactions, each of which locks its row first, so two processes never count the same jobs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache
from typing import Any

import sqlalchemy as sa

from pgqueue.models import SCHEMA
from pgqueue.repository.reading import EPOCH, moment, readable
from pgqueue.repository.tables import (
    Executor,
    array_of,
    array_parameter,
    clock,
    jobs,
    json_parameter,
    operator_actions,
    pg,
    text_parameter,
)

KEPT = timedelta(days=90)
"""How long an action is kept, as failed jobs are by default."""
MOST_IDS = 20
"""Changed jobs that a row names."""

MOST_CONTINUED = 100
"""Entries of one user that are looked at."""

PROGRESS = ("jobs", "skipped", "first_ids", "cursor", "left_ids", "finished_at")
"""The columns that say how far an action has come."""

ID = sa.bindparam("action_id", type_=sa.BigInteger)


@cache
def add_action() -> sa.Executable:
    texts = ("actor", "action", "reason")
    documents = ("target", "options", "before", "after")
    row = sa.insert(operator_actions).values(
        **{name: sa.bindparam(name, type_=sa.Text) for name in texts},
        **{name: json_parameter(name) for name in documents},
        last_id=sa.bindparam("last_id", type_=sa.BigInteger),
        **_progress(),
    )
    return row.returning(operator_actions.c.id, moment(operator_actions.c.at))


@cache
def move_action() -> sa.Executable:
    """Write how far an action has come; the caller has locked it."""
    return sa.update(operator_actions).where(operator_actions.c.id == ID).values(**_progress())


def _progress() -> dict[str, Any]:
    numbers = {name: sa.bindparam(name, type_=sa.Integer) for name in ("jobs", "skipped")}
    is_finished = sa.cast(sa.bindparam("is_finished", type_=sa.Boolean), sa.Boolean)
    return {
        **numbers,
        "first_ids": array_parameter("first_ids", sa.BigInteger),
        "cursor": sa.bindparam("cursor", type_=sa.BigInteger),
        "left_ids": array_parameter("left_ids", sa.BigInteger),
        "finished_at": sa.case((is_finished, clock())),
    }


@cache
def action() -> sa.Executable:
    return sa.select(*map(readable, operator_actions.c)).where(operator_actions.c.id == ID)


@cache
def lock_action() -> sa.Executable:
    """How far an action has come; not its target, which may name a hundred thousand jobs."""
    columns = [operator_actions.c[name] for name in PROGRESS]
    found = sa.select(*map(readable, columns)).where(operator_actions.c.id == ID)
    return found.with_for_update()


@cache
def newest_actions(
    *, of_actor: bool, of_action: bool, before: bool, unfinished: bool
) -> sa.Executable:
    column = operator_actions.c
    words = [
        (of_actor, column.actor == text_parameter("of_actor")),
        (of_action, column.action == text_parameter("of_action")),
        (before, column.id < sa.bindparam("before_id", type_=sa.BigInteger)),
        (unfinished, column.finished_at.is_(None)),
    ]
    return (
        sa.select(*map(readable, column))
        .where(*(condition for is_wanted, condition in words if is_wanted))
        .order_by(column.id.desc())
        .limit(sa.bindparam("limit", type_=sa.Integer))
    )


@cache
def prune_actions() -> sa.Executable:
    kept: sa.ColumnElement[Any] = sa.literal_column(f"interval '{KEPT.days} days'")
    return sa.delete(operator_actions).where(
        operator_actions.c.at < pg.statement_timestamp() - kept
    )


@cache
def may_write() -> sa.Executable:
    """Whether this role may write the log, and how far an action has come."""
    table = f"""'"{SCHEMA}".operator_actions'"""
    insert = sa.literal_column(f"{table}, 'INSERT'", sa.Text)
    update = sa.literal_column(f"{table}, 'cursor', 'UPDATE'", sa.Text)
    return sa.select(
        sa.and_(
            pg.has_table_privilege(insert, type_=sa.Boolean),
            pg.has_column_privilege(update, type_=sa.Boolean),
        )
    )


@cache
def now_and_last_job() -> sa.Executable:
    return sa.select(moment(clock()), pg.max(jobs.c.id, type_=sa.BigInteger))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """An action of an operator; the fields are those of :class:`OperatorAction`."""

    id: int | None = None
    """None while it is not in the log."""
    at: datetime = EPOCH
    """When it began; the log sets it."""
    actor: str
    action: str
    target: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    jobs: int = 0
    skipped: int = 0
    first_ids: Sequence[int] = ()
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    last_id: int | None = None
    cursor: int | None = None
    left_ids: Sequence[int] = field(default_factory=list)
    finished_at: datetime | None = None


class OperatorActions:
    """The log behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def may_write(self) -> bool:
        return bool(self._executor.execute(may_write()).scalar())

    def now_and_last_job(self) -> tuple[datetime, int]:
        """The time of the database, and the highest id of a job; 0 without jobs."""
        now, last_id = self._executor.execute(now_and_last_job()).one()
        return now, last_id or 0

    def add(self, new: LogEntry) -> LogEntry:
        """Write an action that is done or, with ``last_id``, one that begins; returns it with its
        id."""
        parameters = {
            "actor": new.actor,
            "action": new.action,
            "reason": new.reason,
            "target": json.dumps(new.target),
            "options": json.dumps(new.options),
            "before": None if new.before is None else json.dumps(new.before),
            "after": None if new.after is None else json.dumps(new.after),
            "last_id": new.last_id,
            **_values(new, is_finished=new.last_id is None),
        }
        id, at = self._executor.execute(add_action(), parameters).one()
        return replace(new, id=id, at=at)

    def move(self, moved: LogEntry, *, is_finished: bool) -> None:
        """Write how far an action has come, which :meth:`locked` has returned in this
        transaction."""
        values = _values(moved, is_finished=is_finished)
        self._executor.execute(move_action(), {"action_id": moved.id, **values})

    def one(self, id: int) -> LogEntry | None:
        row = self._executor.execute(action(), {"action_id": id}).mappings().one_or_none()
        return None if row is None else _read(row)

    def locked(self, entry: LogEntry) -> LogEntry | None:
        """The action as it is now; other processes wait until this transaction ends."""
        found = self._executor.execute(lock_action(), {"action_id": entry.id})
        row = found.mappings().one_or_none()
        return None if row is None else replace(entry, **row)

    def newest(
        self,
        *,
        limit: int,
        actor: str | None = None,
        action: str | None = None,
        before: int | None = None,
        unfinished: bool = False,
    ) -> list[LogEntry]:
        """The newest actions; ``before``: an id, for the next page."""
        given = {"of_actor": actor, "of_action": action, "before_id": before}
        statement = newest_actions(
            of_actor=actor is not None,
            of_action=action is not None,
            before=before is not None,
            unfinished=unfinished,
        )
        parameters = {name: value for name, value in given.items() if value is not None}
        rows = self._executor.execute(statement, {**parameters, "limit": limit}).mappings()
        return [_read(row) for row in rows]

    def has_continued(self, actor: str, action_id: int) -> bool:
        """Whether the log says that somebody has gone on with an action of another."""
        theirs = self.newest(limit=MOST_CONTINUED, actor=actor, action="continue")
        return any(one.target == {"action": action_id} for one in theirs)

    def prune(self) -> None:
        """Delete the actions whose time is over."""
        self._executor.execute(prune_actions())


def _read(row: sa.RowMapping) -> LogEntry:
    """An action.  Documents that are no objects, which only a hand can have written, are empty."""
    documents = {
        name: row[name] if isinstance(row[name], dict) else {} for name in ("target", "options")
    }
    return LogEntry(**{**row, **documents})


def _values(moved: LogEntry, *, is_finished: bool) -> dict[str, Any]:
    return {
        "jobs": moved.jobs,
        "skipped": moved.skipped,
        "first_ids": array_of(map(str, moved.first_ids)),
        "cursor": moved.cursor,
        "left_ids": array_of(map(str, moved.left_ids)),
        "is_finished": is_finished,
    }
