"""Schedules: find the ticks that are due, move past them, and change the rows."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import IntegrityError

from pgqueue.checks import TASK_NAME, shown
from pgqueue.errors import DuplicateSchedule, ScheduleNotFound
from pgqueue.models import Job, JobStatus
from pgqueue.repository.reading import moment, readable
from pgqueue.repository.tables import (
    Executor,
    array_of,
    array_parameter,
    clock,
    document,
    jobs,
    pg,
    schedules,
    text_parameter,
)
from pgqueue.rules.ticks import Firing, ScheduleRule, checked_rule

NAME = schedules.c.name == text_parameter("schedule_name")
MOMENT = sa.DateTime(timezone=True)
RESULTS = 20
RECENT = 10_000
"""Among so many jobs up to its last tick, the jobs of a schedule are looked for."""

STATE = tuple(
    readable(column)
    for column in (
        schedules.c.name,
        schedules.c.task,
        schedules.c.cron,
        schedules.c.every,
        schedules.c.timezone,
        schedules.c.days,
        schedules.c.catch_up,
        schedules.c.overlap,
        schedules.c.declared_in,
        schedules.c.next_at,
        schedules.c.last_tick_at,
        schedules.c.last_job_id,
        schedules.c.paused_at,
    )
)
"""All but the arguments, which a dashboard's role may not read, and the options."""
ADDED = (
    *("name", "task", "args", "options", "cron", "every", "timezone", "days", "catch_up"),
    *("overlap", "declared_in", "declaration", "next_at", "application"),
)
CALL = (
    sa.cast(schedules.c.args, sa.Text).label("args"),
    sa.cast(schedules.c.options, sa.Text).label("options"),
)


@cache
def due_schedules() -> sa.Executable:
    """Read the schedules of known tasks whose next tick is due, in the order of their ticks.

    Locks nothing: their jobs are prepared first, by the application's code.
    """
    place = sa.tuple_(schedules.c.next_at, schedules.c.name)
    after = sa.tuple_(
        sa.cast(sa.bindparam("after_tick", type_=MOMENT), MOMENT), text_parameter("after_name")
    )
    return (
        sa.select(*STATE, *CALL, moment(pg.statement_timestamp()).label("now"))
        .where(
            schedules.c.paused_at.is_(None),
            schedules.c.next_at <= pg.statement_timestamp(),
            place > after,
            _is_known_task(),
        )
        .order_by(schedules.c.next_at, schedules.c.name)
        .limit(sa.bindparam("limit", type_=sa.BigInteger))
    )


@cache
def lock_schedules() -> sa.Executable:
    """Lock the schedules with these names, and read them as they are now.

    The lock is what makes a tick unique.  A row that another worker has locked is skipped; one that
    another worker has moved while this statement looked for it is read again, in READ COMMITTED,
    and is then not what the jobs were prepared for.
    https://www.postgresql.org/docs/current/transaction-iso.html#XACT-READ-COMMITTED
    """
    return (
        sa.select(*STATE, *CALL, pg.statement_timestamp().label("now"))
        .where(schedules.c.name == sa.any_(array_parameter("names", sa.Text)))
        .with_for_update(skip_locked=True)
    )


@cache
def unfinished_jobs() -> sa.Executable:
    """Which of these jobs have not ended.

    A separate statement, after the schedules were read: an older snapshot may not have the job of
    a tick that another worker has just fired.
    """
    ids = sa.cast(sa.bindparam("job_ids"), sa.ARRAY(sa.BigInteger))
    return sa.select(jobs.c.id).where(jobs.c.id == sa.any_(ids), jobs.c.outcome.is_(None))


@cache
def move_schedules() -> sa.Executable:
    """Move locked schedules past the ticks that were fired, from one JSON document."""
    moved = document(
        "moved",
        sa.column("name", sa.Text),
        sa.column("last_tick_at", MOMENT),
        sa.column("next_at", MOMENT),
        sa.column("last_job_id", sa.BigInteger),
    )
    return (
        sa.update(schedules)
        .where(schedules.c.name == moved.c.name)
        .values(
            last_tick_at=moved.c.last_tick_at,
            next_at=moved.c.next_at,
            last_job_id=sa.func.coalesce(moved.c.last_job_id, schedules.c.last_job_id),
        )
    )


def seconds_to_next_tick() -> sa.ColumnElement[float | None]:
    """How long the next tick of a known task is away; NULL if there is none.

    One index probe: it is asked at each look of each worker.
    """
    next_at = (
        sa.select(schedules.c.next_at)
        .where(schedules.c.paused_at.is_(None), schedules.c.next_at.is_not(None), _is_known_task())
        .order_by(schedules.c.next_at, schedules.c.name)
        .limit(sa.literal_column("1"))
        .scalar_subquery()
    )
    return sa.cast(sa.func.extract("epoch", next_at - clock()), sa.Double)


@cache
def next_tick() -> sa.Executable:
    """The same as a statement."""
    return sa.select(seconds_to_next_tick())


@cache
def add_schedule() -> sa.Executable:
    """Insert a schedule.  The name is checked by the primary key."""
    return sa.insert(schedules).values({name: _value(name) for name in ADDED})


@cache
def read_clock() -> sa.Executable:
    return sa.select(moment(clock()))


@cache
def schedule(*, lock: bool) -> sa.Executable:
    """The state of one schedule, and the time of the database."""
    found = sa.select(*STATE, moment(clock()).label("now")).where(NAME)
    return found.with_for_update() if lock else found


@cache
def call_of_schedule() -> sa.Executable:
    """The task of a schedule, its arguments and its options."""
    return sa.select(schedules.c.task, *CALL).where(NAME)


@cache
def change_schedule(names: tuple[str, ...]) -> sa.Executable:
    """Set these columns of one schedule."""
    return sa.update(schedules).where(NAME).values({name: _value(name) for name in names})


@cache
def pause_schedule() -> sa.Executable:
    """Returns the name if the schedule exists; keeps the time of an earlier pause."""
    paused_at = sa.func.coalesce(schedules.c.paused_at, clock())
    return sa.update(schedules).where(NAME).values(paused_at=paused_at).returning(schedules.c.name)


@cache
def remove_schedule() -> sa.Executable:
    return sa.delete(schedules).where(NAME).returning(schedules.c.name)


@cache
def all_schedules() -> sa.Executable:
    """Every schedule by name, with the time of the database."""
    return sa.select(*STATE, moment(clock()).label("now")).order_by(schedules.c.name)


@cache
def results_of_schedules() -> sa.Executable:
    """The last jobs of each schedule, the newest first, among the jobs before its last tick."""
    about = pg.jsonb_build_object(
        sa.literal_column("'schedule'", sa.Text),
        pg.jsonb_build_object(sa.literal_column("'name'", sa.Text), schedules.c.name),
        type_=JSONB,
    )
    first = schedules.c.last_job_id - sa.literal_column(str(RECENT), sa.BigInteger)
    each = (
        sa.select(Job.id, Job.status.label("status"))
        .where(Job.id <= schedules.c.last_job_id, Job.id > first, Job.task == schedules.c.task)
        .where(Job.meta.contains(about))
        .order_by(Job.id.desc())
        .limit(sa.literal_column(str(RESULTS)))
        .lateral("each")
    )
    found = sa.select(schedules.c.name, each.c.id, each.c.status)
    return found.join_from(schedules, each, sa.true()).order_by(schedules.c.name, each.c.id.desc())


@cache
def declared_schedules() -> sa.Executable:
    """What the last synchronisation has written of these schedules."""
    return sa.select(
        schedules.c.name,
        schedules.c.application,
        schedules.c.declared_in,
        sa.cast(schedules.c.declaration, sa.Text),
    ).where(schedules.c.name == sa.any_(array_parameter("names", sa.Text)))


@cache
def pause_undeclared() -> sa.Executable:
    """Pause the schedules that these modules of an application have declared before and declare no
    longer.

    One that is paused already stays as it is: should the code declare it again, it stays paused.
    """
    return (
        sa.update(schedules)
        .where(
            schedules.c.paused_at.is_(None),
            schedules.c.application == text_parameter("of_application"),
            schedules.c.declared_in == sa.any_(array_parameter("modules", sa.Text)),
            schedules.c.declaration.is_not(None),
            ~(schedules.c.name == sa.any_(array_parameter("names", sa.Text))),
        )
        .values(paused_at=clock(), declaration=sa.null())
        .returning(schedules.c.name, schedules.c.declared_in)
    )


def _is_known_task() -> sa.ColumnElement[bool]:
    return schedules.c.task == sa.any_(array_parameter("tasks", sa.Text))


def _value(name: str) -> sa.ColumnElement[Any]:
    """The parameter for a column; JSON is sent as text."""
    type_ = schedules.c[name].type
    return sa.cast(sa.bindparam(name, type_=sa.Text if isinstance(type_, JSONB) else type_), type_)


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """A schedule as it stands, without its arguments."""

    name: str
    task: str
    cron: str | None
    every: timedelta | None
    timezone: str
    days: str
    """Whether a day must match the day of the month "or" that of the week, or both: "and"."""
    catch_up: int
    """How many missed ticks get a job: 0 for "none", 1 for "last"."""
    overlap: str
    declared_in: str | None
    """The module that declares the schedule; None if the application has added it."""
    next_at: datetime | None
    last_tick_at: datetime | None
    last_job_id: int | None
    paused_at: datetime | None
    read_at: datetime
    """The time of the database at which this was read."""

    @property
    def rule(self) -> ScheduleRule:
        """The rule.  Raises OptionError if this system cannot read it."""
        where = f"schedule {self.name}: "
        return checked_rule(where, self.cron, self.every, self.timezone, self.days)

    def next_runs(self, number: int) -> list[datetime]:
        """Return the next ticks in UTC.

        Args:
            number: How many.

        Returns:
            The times; none while the schedule is paused.

        Raises:
            OptionError: This system cannot read the rule, for example for lack of its zone.
        """
        if self.paused_at is not None or self.next_at is None:
            return []
        ticks = [self.next_at.astimezone(UTC)]
        for tick in self.rule.ticks(max(self.next_at, self.read_at)):
            if len(ticks) >= number:
                break
            ticks.append(tick)
        return ticks[:number]


class DueSchedule(NamedTuple):
    """A schedule whose next tick is due."""

    state: ScheduleState
    args: str
    options: str

    def is_same(self, later: "DueSchedule") -> bool:
        """Whether the row has not changed between two reads."""
        now = replace(later.state, read_at=self.state.read_at)
        return (now, *later[1:]) == tuple(self)


class StoredCall(NamedTuple):
    """What the jobs of a schedule have in common."""

    task: str
    args: str
    options: str


class DeclaredRow(NamedTuple):
    """Who has written a schedule, and what the code declared then."""

    application: str
    declared_in: str | None
    declaration: Any


class Moved(NamedTuple):
    """Where a schedule stands after its due ticks were fired or passed over."""

    name: str
    firing: Firing
    last_job_id: int | None


class ScheduleRows:
    """The schedules behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def due(self, tasks: str, *, after: DueSchedule | None, limit: int) -> list[DueSchedule]:
        """Read the due schedules of these tasks that follow another one, as ``array_of`` names
        the tasks."""
        place = {"after_tick": datetime.min.replace(year=2000, tzinfo=UTC), "after_name": ""}
        if after is not None:
            place = {"after_tick": after.state.next_at, "after_name": after.state.name}
        parameters = {**place, "tasks": tasks, "limit": limit}
        rows = self._executor.execute(due_schedules(), parameters)
        return [_due_schedule(row) for row in rows]

    def lock(self, names: Iterable[str]) -> dict[str, DueSchedule]:
        """Lock these schedules, but for those that another transaction has locked."""
        parameters = {"names": array_of(names)}
        rows = self._executor.execute(lock_schedules(), parameters)
        return {row[0]: _due_schedule(row) for row in rows}

    def unfinished(self, job_ids: Sequence[int]) -> set[int]:
        """Which of these jobs have not ended."""
        found = self._executor.execute(unfinished_jobs(), {"job_ids": list(job_ids)})
        return {row[0] for row in found}

    def move(self, moved: Iterable[Moved]) -> None:
        """Move locked schedules past their due ticks."""
        rows = [
            {
                "name": each.name,
                "last_tick_at": each.firing.last_tick_at.isoformat(),
                "next_at": each.firing.next_at and each.firing.next_at.isoformat(),
                "last_job_id": each.last_job_id,
            }
            for each in moved
        ]
        if rows:
            self._executor.execute(move_schedules(), {"moved": json.dumps(rows)})

    def seconds_to_next(self, tasks: str) -> float | None:
        """How long the next tick of these tasks is away; None if there is none."""
        found = self._executor.execute(next_tick(), {"tasks": tasks})
        seconds: float | None = found.scalar()
        return seconds

    def now(self) -> datetime:
        """The time of the database."""
        now: datetime = self._executor.execute(read_clock()).scalar_one()
        return now

    def add(self, values: Mapping[str, Any]) -> None:
        """Insert a schedule.  Raises DuplicateSchedule, and leaves the transaction usable."""
        try:
            with self._executor.begin_nested():
                self._executor.execute(add_schedule(), values)
        except IntegrityError as error:
            if "schedules_pkey" not in str(error.orig):
                raise
            raise DuplicateSchedule(
                f"schedule {values['name']}: there is one with this name; give another name=, or "
                "use queue.schedules.change"
            ) from error

    def locked(self, name: str) -> ScheduleState:
        """Lock a schedule.  Raises ScheduleNotFound."""
        return ScheduleState(*self._one(schedule(lock=True), name))

    def state(self, name: str) -> ScheduleState:
        """Raises ScheduleNotFound."""
        return ScheduleState(*self._one(schedule(lock=False), name))

    def call(self, name: str) -> StoredCall:
        """The task of a schedule and its arguments.  Raises ScheduleNotFound."""
        return StoredCall(*self._one(call_of_schedule(), name))

    def change(self, name: str, values: Mapping[str, Any]) -> None:
        """Set columns of a locked schedule."""
        statement = change_schedule(tuple(sorted(values)))
        self._executor.execute(statement, {**values, "schedule_name": name})

    def pause(self, name: str) -> None:
        self._one(pause_schedule(), name)

    def remove(self, name: str) -> None:
        self._one(remove_schedule(), name)

    def all(self) -> list[ScheduleState]:
        return [ScheduleState(*row) for row in self._executor.execute(all_schedules())]

    def results(self) -> dict[str, list[tuple[int, JobStatus]]]:
        """The last jobs of each schedule with their statuses, the newest first.

        Reads at most :data:`RECENT` jobs of each; older jobs are not found.
        """
        found: dict[str, list[tuple[int, JobStatus]]] = {}
        for name, job_id, status in self._executor.execute(results_of_schedules()):
            found.setdefault(name, []).append((job_id, JobStatus(status)))
        return found

    def declared(self, names: Iterable[str]) -> dict[str, DeclaredRow]:
        """Who has declared those of these schedules that exist, and how; by name."""
        parameters = {"names": array_of(names)}
        rows = self._executor.execute(declared_schedules(), parameters)
        return {
            name: DeclaredRow(application, module, text and json.loads(text))
            for name, application, module, text in rows
        }

    def pause_undeclared(
        self, application: str, modules: Iterable[str], names: Iterable[str]
    ) -> list[str]:
        """Pause what these modules of an application have declared before, but for these names;
        returns names."""
        parameters = {
            "of_application": application,
            "modules": array_of(modules),
            "names": array_of(names),
        }
        rows = self._executor.execute(pause_undeclared(), parameters)
        return sorted(row[0] for row in rows)

    def _one(self, statement: Any, name: str) -> Any:
        """The row of one schedule; raises ScheduleNotFound, also for what is no name."""
        row = None
        if isinstance(name, str) and TASK_NAME.fullmatch(name):
            row = self._executor.execute(statement, {"schedule_name": name}).first()
        if row is None:
            raise ScheduleNotFound(
                f"schedule {shown(name)} does not exist: it was never committed, or has been "
                "removed; `pgqueue schedules` lists all"
            )
        return row


def _due_schedule(row: Any) -> DueSchedule:
    return DueSchedule(ScheduleState(*(*row[:-3], row[-1])), row[-3], row[-2])
