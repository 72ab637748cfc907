"""Schedules: the rows, and what firing a tick writes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from pgqueue.checks import TASK_NAME, shown
from pgqueue.errors import DuplicateSchedule, ScheduleNotFound
from pgqueue.schedule_rules import Firing, Rule, checked_rule
from pgqueue.statements import schedules as statements
from pgqueue.statements.tables import array_of


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """A schedule as it stands, without its arguments."""

    name: str
    task: str
    cron: str | None
    every: timedelta | None
    timezone: str
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
    def rule(self) -> Rule:
        """The rule.  Raises OptionError if this system cannot read it."""
        return checked_rule(f"schedule {self.name}: ", self.cron, self.every, self.timezone)

    def next_runs(self, number: int) -> list[datetime]:
        """The next ticks in UTC; none while the schedule is paused.

        Raises OptionError if this system cannot read the rule, for example for lack of its zone.
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


class Call(NamedTuple):
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

    def __init__(self, executor: Session | Connection) -> None:
        self._executor = executor

    def due(self, tasks: str, *, after: DueSchedule | None, limit: int) -> list[DueSchedule]:
        """Read the due schedules of these tasks that follow another one, as ``array_of`` names
        the tasks."""
        place = {"after_tick": datetime.min.replace(year=2000, tzinfo=UTC), "after_name": ""}
        if after is not None:
            place = {"after_tick": after.state.next_at, "after_name": after.state.name}
        parameters = {**place, "tasks": tasks, "limit": limit}
        rows = self._executor.execute(statements.due_schedules(), parameters)
        return [_due_schedule(row) for row in rows]

    def lock(self, names: Iterable[str]) -> dict[str, DueSchedule]:
        """Lock these schedules, but for those that another transaction has locked."""
        parameters = {"names": array_of(names)}
        rows = self._executor.execute(statements.lock_schedules(), parameters)
        return {row[0]: _due_schedule(row) for row in rows}

    def unfinished(self, job_ids: Sequence[int]) -> set[int]:
        """Which of these jobs have not ended."""
        found = self._executor.execute(statements.unfinished_jobs(), {"job_ids": list(job_ids)})
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
            self._executor.execute(statements.move_schedules(), {"moved": json.dumps(rows)})

    def seconds_to_next(self, tasks: str) -> float | None:
        """How long the next tick of these tasks is away; None if there is none."""
        found = self._executor.execute(statements.next_tick(), {"tasks": tasks})
        seconds: float | None = found.scalar()
        return seconds

    def now(self) -> datetime:
        """The time of the database."""
        now: datetime = self._executor.execute(statements.read_clock()).scalar_one()
        return now

    def add(self, values: Mapping[str, Any]) -> None:
        """Insert a schedule.  Raises DuplicateSchedule, and leaves the transaction usable."""
        try:
            with self._executor.begin_nested():
                self._executor.execute(statements.add_schedule(), values)
        except IntegrityError as error:
            if "schedules_pkey" not in str(error.orig):
                raise
            raise DuplicateSchedule(
                f"schedule {values['name']}: there is one with this name; give another name=, or "
                "use queue.schedules.change"
            ) from error

    def locked(self, name: str) -> ScheduleState:
        """Lock a schedule.  Raises ScheduleNotFound."""
        return ScheduleState(*self._one(statements.lock_schedule(), name))

    def call(self, name: str) -> Call:
        """The task of a schedule and its arguments.  Raises ScheduleNotFound."""
        return Call(*self._one(statements.call_of_schedule(), name))

    def change(self, name: str, values: Mapping[str, Any]) -> None:
        """Set columns of a locked schedule."""
        statement = statements.change_schedule(tuple(sorted(values)))
        self._executor.execute(statement, {**values, "schedule_name": name})

    def pause(self, name: str) -> None:
        self._one(statements.pause_schedule(), name)

    def remove(self, name: str) -> None:
        self._one(statements.remove_schedule(), name)

    def all(self) -> list[ScheduleState]:
        return [ScheduleState(*row) for row in self._executor.execute(statements.all_schedules())]

    def declared(self, names: Iterable[str]) -> dict[str, DeclaredRow]:
        """Who has declared those of these schedules that exist, and how; by name."""
        parameters = {"names": array_of(names)}
        rows = self._executor.execute(statements.declared_schedules(), parameters)
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
        rows = self._executor.execute(statements.pause_undeclared(), parameters)
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
