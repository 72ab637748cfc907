"""Schedules: those that the code declares, and the operations on the rows of all."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Any, Literal, TypedDict, Unpack

from sqlalchemy import Connection

from pgqueue import redaction
from pgqueue.checks import TASK_NAME, check, optional, start
from pgqueue.database.callers import AnySession, executor, in_transaction, translated_errors
from pgqueue.database.two_phase import commit_in_two_phases
from pgqueue.errors import DuplicateSchedule, OptionError, TaskDefinitionError, UnknownOption
from pgqueue.repository.schedules import ScheduleRows, ScheduleState
from pgqueue.rules.ticks import (
    ScheduleRule,
    checked_catch_up,
    checked_overlap,
    checked_rule,
    next_after,
    zone_of,
)
from pgqueue.tasks import PreparedJob, Task
from pgqueue.tasks.address import module_of

logger = redaction.logger(__name__)

CatchUp = Literal["none", "last"] | int
OverlapName = Literal["allow", "skip", "wait"]
Days = Literal["or", "and"]
MICROSECOND = timedelta(microseconds=1)

META_KEY = "schedule"
"""The key of a job's meta with the name of its schedule and its tick."""
MAKES_ARGS = "makes_args"
"""Among the stored options: the code declares a function that makes the arguments of a tick."""
MOST_BACKFILLED = 10_000

ArgsMaker = Callable[[datetime], tuple[Any, ...] | Mapping[str, Any] | None]
"""Returns the arguments of the job of a tick; None: the tick has no job."""
Args = tuple[Any, ...] | Mapping[str, Any] | ArgsMaker


class ScheduleOptions(TypedDict, total=False):
    """The options of the jobs of a schedule, where they differ from those of the task."""

    queue: str
    priority: int
    max_attempts: int
    unique_key: str
    meta: Mapping[str, Any]
    tags: list[str]


@dataclass(frozen=True, slots=True)
class Declaration:
    """A schedule as code or application give it, checked."""

    name: str
    task: str
    rule: ScheduleRule
    catch_up: int
    overlap: str
    args: str
    options: Mapping[str, Any]
    declared_in: str | None = None
    make_args: ArgsMaker | None = None
    at_once: bool = False
    """Whether the first tick is when the row is written.  Not a part of the row."""

    def first_tick(self, now: datetime) -> datetime | None:
        """When the first tick of a row that is written now is due."""
        return now if self.at_once else next_after(self.rule, now, None)

    def columns(self) -> dict[str, Any]:
        """The values of the columns that an application chooses."""
        return {
            "task": self.task,
            **asdict(self.rule),
            "catch_up": self.catch_up,
            "overlap": self.overlap,
            "args": self.args,
            "options": json.dumps(self.options),
            "declared_in": self.declared_in,
            "declaration": None if self.declared_in is None else json.dumps(self.document()),
        }

    def document(self) -> dict[str, Any]:
        """The same as JSON data, to be compared with what an earlier worker has declared."""
        every = self.rule.every
        return {
            "task": self.task,
            "cron": self.rule.cron,
            "every": None if every is None else every.total_seconds(),
            "timezone": self.rule.timezone,
            "days": self.rule.days,
            "catch_up": self.catch_up,
            "overlap": self.overlap,
            "args": json.loads(self.args),
            "options": dict(self.options),
        }


class Schedules:
    """The schedules of a :class:`PgQueue`, as ``queue.schedules``.

    Every method takes the caller's Session or Connection, joins its transaction and commits
    nothing.  With an AsyncSession: ``await session.run_sync(queue.schedules.pause, name)``.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task[..., Any]],
        find: Callable[[str], Task[..., Any]],
        application: str,
    ) -> None:
        self._application = application
        self._tasks = tasks
        self._find = find
        self.declared: dict[str, Declaration] = {}
        """What the code declares by ``@queue.schedule``, by name."""
        self._declarers: dict[str, Task[..., Any]] = {}

    @translated_errors()
    def add(
        self,
        session: AnySession,
        task: Task[..., Any],
        cron: str | None = None,
        *,
        name: str,
        every: timedelta | None = None,
        timezone: str = "UTC",
        days: Days = "or",
        args: tuple[Any, ...] | Mapping[str, Any] = (),
        catch_up: CatchUp = "last",
        overlap: OverlapName = "allow",
        at_once: bool = False,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        """Add a schedule, which takes effect when the caller's transaction commits.

        Args:
            session: A Session or Connection, in whose transaction the schedule is written.
            task: Any task of the queue, without ``task.options(...)``.
            cron: As for :meth:`PgQueue.schedule`.
            name: The name of the schedule.
            every: As for :meth:`PgQueue.schedule`.
            timezone: As for :meth:`PgQueue.schedule`.
            days: As for :meth:`PgQueue.schedule`.
            args: As for :meth:`PgQueue.schedule`.
            catch_up: As for :meth:`PgQueue.schedule`.
            overlap: As for :meth:`PgQueue.schedule`.
            at_once: Whether the first tick is now, and not the next of the rule.
            **options: As for :meth:`PgQueue.schedule`.

        Raises:
            DuplicateSchedule: The name is taken.
            OptionError: The rule or an option is wrong.
            ArgumentsError, PayloadError: The arguments do not fit the task.

        Example:
            >>> queue.schedules.add(session, mail, "0 9 * * 1", name="ann", args=("ann@",))
        """
        rule = checked_rule(f"schedule {name}: ", cron, every, timezone, days)
        new = declaration(task, rule, name, args, catch_up, overlap, options, at_once=at_once)
        if new.make_args is not None:
            raise OptionError(
                f"schedule {name}: args is a function, which the table cannot store; give a tuple "
                "or a dict, or declare the schedule in the code with @queue.schedule"
            )
        rows = ScheduleRows(in_transaction(session, f"schedule {name}"))
        rows.add(self._new_row(new, rows.now()))

    @translated_errors()
    def change(
        self,
        session: AnySession,
        name: str,
        cron: str | None = None,
        *,
        every: timedelta | None = None,
        timezone: str | None = None,
        days: Days | None = None,
        args: tuple[Any, ...] | Mapping[str, Any] | None = None,
        catch_up: CatchUp | None = None,
        overlap: OverlapName | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        """Change what is given, and leave the rest; the next tick is that of the changed rule.

        A change of a schedule that the code declares lasts until the code declares it otherwise.

        Args:
            session: A Session or Connection, in whose transaction the schedule is changed.
            name: The name of the schedule.
            cron: As for :meth:`PgQueue.schedule`; replaces ``every``.
            every: As for :meth:`PgQueue.schedule`; replaces ``cron``.
            timezone: As for :meth:`PgQueue.schedule`.
            days: As for :meth:`PgQueue.schedule`.
            args: As for :meth:`PgQueue.schedule`.
            catch_up: As for :meth:`PgQueue.schedule`.
            overlap: As for :meth:`PgQueue.schedule`.
            **options: As for :meth:`PgQueue.schedule`.

        Raises:
            ScheduleNotFound: There is no such schedule.
            OptionError, ArgumentsError, PayloadError: As by :meth:`add`.
        """
        where = f"schedule {name}: "
        rows = ScheduleRows(in_transaction(session, f"schedule {name}"))
        state = rows.locked(name)
        if cron is None and every is None:
            cron, every = state.cron, state.every
            own_days: str = state.days if days is None else days
        else:
            own_days = "or" if days is None else days
        zone = _given_or(timezone, state.timezone)
        rule = checked_rule(where, cron, every, zone, own_days)
        number = state.catch_up if catch_up is None else checked_catch_up(where, catch_up)
        values: dict[str, Any] = {
            **asdict(rule),
            "catch_up": number,
            "overlap": checked_overlap(where, _given_or(overlap, state.overlap), number),
        }
        if args is not None or options:
            call = rows.call(name)
            task = self._find(call.task)
            merged = {**json.loads(call.options), **checked_options(task, name, options)}
            if args is not None:
                values["args"] = task.stored(args)
                merged.pop(MAKES_ARGS, None)
            values["options"] = json.dumps(merged)
        if rule != rule_of(state):
            values["next_at"] = next_after(rule, state.read_at, state.last_tick_at)
        rows.change(name, values)

    @translated_errors()
    def pause(self, session: AnySession, name: str) -> None:
        """Fire no tick until :meth:`resume`.

        Args:
            session: A Session or Connection, in whose transaction the pause is written.
            name: The name of the schedule.

        Raises:
            ScheduleNotFound: There is no such schedule.
        """
        ScheduleRows(executor(session)).pause(name)

    @translated_errors()
    def resume(self, session: AnySession, name: str) -> None:
        """Undo :meth:`pause`; the ticks of the pause are not made up.

        Args:
            session: A Session or Connection, in whose transaction the pause ends.
            name: The name of the schedule.

        Raises:
            ScheduleNotFound: There is no such schedule.
        """
        rows = ScheduleRows(in_transaction(session, f"schedule {name}"))
        state = rows.locked(name)
        if state.paused_at is not None:
            next_at = next_after(state.rule, state.read_at, state.last_tick_at)
            rows.change(name, {"paused_at": None, "next_at": next_at})

    @translated_errors()
    def remove(self, session: AnySession, name: str) -> None:
        """Delete a schedule; its jobs stay.

        A schedule that the code declares is added again when the next worker starts: pause it, or
        remove it from the code.

        Args:
            session: A Session or Connection, in whose transaction the schedule is deleted.
            name: The name of the schedule.

        Raises:
            ScheduleNotFound: There is no such schedule.
        """
        ScheduleRows(executor(session)).remove(name)

    @translated_errors()
    def trigger(self, session: AnySession, name: str) -> int:
        """Enqueue a job of the schedule now.

        This is no tick: the next tick stays where it is, and does not wait for this job.  Works
        while the schedule is paused.

        Args:
            session: A Session or Connection, in whose transaction the job is written.
            name: The name of the schedule.

        Returns:
            The id of the job.

        Raises:
            ScheduleNotFound: There is no such schedule.
            UnknownTask: This application does not have the task.
        """
        connection = executor(session)
        commit_in_two_phases(connection)
        rows = ScheduleRows(connection)
        call, state = rows.call(name), rows.state(name)
        task = self._find(call.task)
        job = self.prepared(task, state, call.args, call.options, tick=None)
        if job is None:
            raise OptionError(
                f"schedule {name}: the function of its arguments has returned None, so it has no "
                "job now"
            )
        return task.enqueue_prepared(connection, job)

    @translated_errors()
    def backfill(
        self,
        session: AnySession,
        name: str,
        since: datetime,
        until: datetime | None = None,
    ) -> Sequence[int]:
        """Enqueue a job for each tick of a time that has passed, whether it was fired or not.

        The jobs are those of ticks, with the tick in ``ctx.meta["schedule"]``, and are due now.
        The next tick stays where it is.  A unique key of the task holds here too.

        Args:
            session: A Session or Connection.
            name: The schedule.
            since: The first tick is at this time or later.
            until: The last tick is before this time.  None: now.

        Returns:
            The ids of the jobs, in the order of their ticks.

        Raises:
            ScheduleNotFound: There is no such schedule.
            OptionError: A time has no zone or is yet to come, or there are more than 10,000 ticks.
            UnknownTask: This application does not have the task.
        """
        where = f"backfill of schedule {name}: "
        check(where, "since", since, start)
        check(where, "until", until, optional(start))
        connection = in_transaction(session, f"backfill of schedule {name}")
        commit_in_two_phases(connection)
        rows = ScheduleRows(connection)
        call, state = rows.call(name), rows.state(name)
        end = state.read_at if until is None else until
        for given, time in (("since", since), ("until", end)):
            if time > state.read_at:
                raise OptionError(f"{where}{given} is {time}, which is yet to come")
        passed = takewhile(lambda tick: tick < end, state.rule.ticks(since - MICROSECOND))
        ticks = [*islice(passed, MOST_BACKFILLED + 1)]
        if len(ticks) > MOST_BACKFILLED:
            raise OptionError(
                f"{where}there are more than {MOST_BACKFILLED:,} ticks, up to {ticks[-2]} so many; "
                "give a shorter time, and commit before the next"
            )
        task = self._find(call.task)
        jobs = [self.prepared(task, state, call.args, call.options, tick=tick) for tick in ticks]
        return [task.enqueue_prepared(connection, job) for job in jobs if job is not None]

    def prepared(
        self,
        task: Task[..., Any],
        state: ScheduleState,
        args: str,
        options: str,
        *,
        tick: datetime | None,
    ) -> PreparedJob | None:
        """Return the job of a tick, or of now; None if the function of its arguments wants none.

        Raises OptionError if the code of this application does not have the function.
        """
        stored: dict[str, Any] = json.loads(options)
        if stored.pop(MAKES_ARGS, False):
            declared = self.declared.get(state.name)
            if declared is None or declared.make_args is None:
                raise OptionError(
                    f"schedule {state.name}: its arguments are made by a function, which this "
                    "version of the application does not declare"
                )
            made = declared.make_args((tick or state.read_at).astimezone(zone_of(state.timezone)))
            if made is None:
                return None
            args = task.stored(made)
        about = {"name": state.name, "tick": tick and tick.astimezone(UTC).isoformat()}
        meta = {**stored.pop("meta", {}), META_KEY: about}
        return task.options(**stored, meta=meta).prepared(args)

    @translated_errors()
    def list(self, session: AnySession) -> "list[ScheduleState]":
        """Return all schedules.

        Args:
            session: A Session or Connection to read with.

        Returns:
            The schedules by name; :meth:`ScheduleState.next_runs` has their next ticks.
        """
        return ScheduleRows(executor(session)).all()

    def declare(self, task: Task[..., Any], declared: Declaration) -> None:
        """Remember a schedule of the code, for :meth:`synchronise`."""
        before = self._declarers.get(declared.name)
        # A module that is loaded again makes another task of the same name.
        if before is task or (before is not None and before.name != task.name):
            raise TaskDefinitionError(
                f"schedule {declared.name} is declared already, for task {before.name}; give each "
                "schedule of a task a name=... of its own"
            )
        self._declarers[declared.name] = task
        self.declared[declared.name] = replace(declared, declared_in=module_of(task.function))

    def synchronise(self, connection: Connection) -> None:
        """Write the schedules of the code, in a transaction of the caller's.

        A row is written if the code declares something else than at the last time.  What these
        modules have declared before, and do not now, is paused.
        """
        for new in self.differing(connection):
            self.write(connection, new)
        self.pause_undeclared(connection)

    def unwritten(self, written: Collection[str], now: datetime) -> Sequence[ScheduleState]:
        """Return the schedules of the code that no worker has written so far, as a worker that
        started now would write them.

        ``written``: the names of the rows.  ``now``: the time of the database.
        """
        return [
            ScheduleState(
                name=name,
                task=new.task,
                **asdict(new.rule),
                catch_up=new.catch_up,
                overlap=new.overlap,
                declared_in=new.declared_in,
                next_at=new.first_tick(now),
                last_tick_at=None,
                last_job_id=None,
                paused_at=None,
                read_at=now,
            )
            for name, new in sorted(self.declared.items())
            if name not in written
        ]

    def differing(self, connection: Connection) -> Sequence[Declaration]:
        """Return the schedules of the code that the rows do not have as they are declared."""
        found = ScheduleRows(connection).declared(self.declared)
        differing = []
        for name, new in sorted(self.declared.items()):
            row = found.get(name)
            if row is not None and row.declared_in is None:
                logger.error(
                    "schedule %s of the code: the application has added a schedule with this "
                    "name, which stays as it is; give the one of the code another name=",
                    name,
                )
            elif row is not None and row.application not in ("", self._application):
                logger.error(
                    "schedule %s of the code: application %s declares a schedule with this name, "
                    "which stays as it is; give one of them another name=",
                    name,
                    row.application,
                )
            elif row is None or (row.application, row.declaration) != (
                self._application,
                new.document(),
            ):
                differing.append(new)
        return differing

    def write(self, connection: Connection, declared: Declaration) -> None:
        """Add a schedule of the code, or replace its row.

        A pause stays, unless it was for a schedule that the code did not declare.  Only another
        rule moves the next tick: one that was missed before a deploy is still made up.
        """
        rows = ScheduleRows(connection)
        try:
            rows.add(self._new_row(declared, rows.now()))
            logger.info("schedule %s: added", declared.name)
            return
        except DuplicateSchedule:
            state = rows.locked(declared.name)
        values = {**declared.columns(), "application": self._application}
        row = rows.declared([declared.name])[declared.name]
        came_back = row.declaration is None
        if came_back:
            values["paused_at"] = None
        if came_back or declared.rule != rule_of(state):
            values["next_at"] = next_after(declared.rule, state.read_at, state.last_tick_at)
        rows.change(declared.name, values)
        logger.info("schedule %s: changed to what the code declares", declared.name)

    def pause_undeclared(self, connection: Connection) -> None:
        """Pause the schedules that these modules have declared before, and do not now."""
        rows = ScheduleRows(connection)
        modules = {module_of(task.function) for task in self._tasks.values()}
        for name in rows.pause_undeclared(self._application, modules, self.declared):
            logger.warning(
                "schedule %s: the code declares it no longer, so it is paused; remove it with "
                "`pgqueue schedules remove`",
                name,
            )

    def _new_row(self, new: Declaration, now: datetime) -> dict[str, Any]:
        return {
            **new.columns(),
            "name": new.name,
            "application": self._application,
            "next_at": new.first_tick(now),
        }


def declaration(
    task: Any,
    rule: ScheduleRule,
    name: str,
    args: Any,
    catch_up: Any,
    overlap: Any,
    options: Mapping[str, Any],
    *,
    at_once: Any,
) -> Declaration:
    """Return a schedule of a task, checked; raises OptionError and what the arguments raise."""
    where = f"schedule {name}: "
    if not isinstance(task, Task):
        raise TaskDefinitionError(
            f"{where}{task!r} is no task; give a function that has @queue.task; the decorator "
            "@queue.schedule(...) stands above @queue.task"
        )
    if not isinstance(name, str) or not TASK_NAME.fullmatch(name):
        raise OptionError(
            f"the name of a schedule is {repr(name)[:60]}; use 1 to 200 characters without spaces"
        )
    if task.is_from_options:
        raise OptionError(
            f"{where}the options of task.options(...) would be lost; give queue, priority, "
            "max_attempts, unique_key, meta and tags to the schedule, and others to the task"
        )
    if not isinstance(at_once, bool):
        raise OptionError(f"{where}at_once is {at_once!r}; give True or False")
    number = checked_catch_up(where, catch_up)
    checked = checked_options(task, name, options)
    make_args = args if callable(args) else None
    if make_args is not None:
        checked[MAKES_ARGS] = True
    return Declaration(
        name=name,
        task=task.name,
        rule=rule,
        catch_up=number,
        overlap=checked_overlap(where, overlap, number),
        args="{}" if make_args is not None else task.stored(args),
        options=checked,
        make_args=make_args,
        at_once=at_once,
    )


def checked_options(task: Task[..., Any], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a schedule as plain JSON data."""
    where = f"schedule {name}: "
    for option in options:
        if option not in ScheduleOptions.__annotations__:
            raise UnknownOption(
                f"{where}there is no option {option!r}; known are "
                f"{', '.join(ScheduleOptions.__annotations__)}"
            )
    if "unique_key" in options and not isinstance(options["unique_key"], str):
        raise OptionError(
            f"{where}unique_key is {options['unique_key']!r}; give a str, or a callable to the "
            "task itself"
        )
    settings = task.options(**options).settings
    plain = {option: getattr(settings, option) for option in options}
    if "tags" in plain:
        plain["tags"] = list(plain["tags"])
    return plain


def rule_of(state: ScheduleState) -> ScheduleRule:
    """The rule of a row, as it stands there."""
    return ScheduleRule(state.cron, state.every, state.timezone, state.days)


def _given_or(given: str | None, before: str) -> str:
    return before if given is None else given
