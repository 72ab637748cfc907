"""Schedules: find the ticks that are due, move past them, and change the rows."""

from functools import cache
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    DateTime,
    Double,
    Executable,
    Text,
    any_,
    bindparam,
    cast,
    column,
    delete,
    func,
    insert,
    literal_column,
    null,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.statements.reading import moment, readable
from pgqueue.statements.tables import (
    array_parameter,
    clock,
    document,
    jobs,
    pg,
    schedules,
    text_parameter,
)

NAME = schedules.c.name == text_parameter("schedule_name")
MOMENT = DateTime(timezone=True)

STATE = tuple(
    readable(column)
    for column in (
        schedules.c.name,
        schedules.c.task,
        schedules.c.cron,
        schedules.c.every,
        schedules.c.timezone,
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
    *("name", "task", "args", "options", "cron", "every", "timezone", "catch_up", "overlap"),
    *("declared_in", "declaration", "next_at", "application"),
)
CALL = (
    cast(schedules.c.args, Text).label("args"),
    cast(schedules.c.options, Text).label("options"),
)


@cache
def due_schedules() -> Executable:
    """Read the schedules of known tasks whose next tick is due, in the order of their ticks.

    Locks nothing: their jobs are prepared first, by the application's code.
    """
    place = tuple_(schedules.c.next_at, schedules.c.name)
    after = tuple_(
        cast(bindparam("after_tick", type_=MOMENT), MOMENT), text_parameter("after_name")
    )
    return (
        select(*STATE, *CALL, moment(pg.statement_timestamp()).label("now"))
        .where(
            schedules.c.paused_at.is_(None),
            schedules.c.next_at <= pg.statement_timestamp(),
            place > after,
            _is_known_task(),
        )
        .order_by(schedules.c.next_at, schedules.c.name)
        .limit(bindparam("limit", type_=BigInteger))
    )


@cache
def lock_schedules() -> Executable:
    """Lock the schedules with these names, and read them as they are now.

    The lock is what makes a tick unique.  A row that another worker has locked is skipped; one that
    another worker has moved while this statement looked for it is read again, in READ COMMITTED,
    and is then not what the jobs were prepared for.
    https://www.postgresql.org/docs/current/transaction-iso.html#XACT-READ-COMMITTED
    """
    return (
        select(*STATE, *CALL, pg.statement_timestamp().label("now"))
        .where(schedules.c.name == any_(array_parameter("names", Text)))
        .with_for_update(skip_locked=True)
    )


@cache
def unfinished_jobs() -> Executable:
    """Which of these jobs have not ended.

    A separate statement, after the schedules were read: an older snapshot may not have the job of
    a tick that another worker has just fired.
    """
    ids = cast(bindparam("job_ids"), ARRAY(BigInteger))
    return select(jobs.c.id).where(jobs.c.id == any_(ids), jobs.c.outcome.is_(None))


@cache
def move_schedules() -> Executable:
    """Move locked schedules past the ticks that were fired, from one JSON document."""
    moved = document(
        "moved",
        column("name", Text),
        column("last_tick_at", MOMENT),
        column("next_at", MOMENT),
        column("last_job_id", BigInteger),
    )
    return (
        update(schedules)
        .where(schedules.c.name == moved.c.name)
        .values(
            last_tick_at=moved.c.last_tick_at,
            next_at=moved.c.next_at,
            last_job_id=func.coalesce(moved.c.last_job_id, schedules.c.last_job_id),
        )
    )


def seconds_to_next_tick() -> ColumnElement[float | None]:
    """How long the next tick of a known task is away; NULL if there is none.

    One index probe: it is asked at each look of each worker.
    """
    next_at = (
        select(schedules.c.next_at)
        .where(schedules.c.paused_at.is_(None), schedules.c.next_at.is_not(None), _is_known_task())
        .order_by(schedules.c.next_at, schedules.c.name)
        .limit(literal_column("1"))
        .scalar_subquery()
    )
    return cast(func.extract("epoch", next_at - clock()), Double)


@cache
def next_tick() -> Executable:
    """The same as a statement."""
    return select(seconds_to_next_tick())


@cache
def add_schedule() -> Executable:
    """Insert a schedule.  The name is checked by the primary key."""
    return insert(schedules).values({name: _value(name) for name in ADDED})


@cache
def read_clock() -> Executable:
    return select(moment(clock()))


@cache
def lock_schedule() -> Executable:
    """Lock one schedule; returns its state and the time of the database."""
    return select(*STATE, moment(clock()).label("now")).where(NAME).with_for_update()


@cache
def call_of_schedule() -> Executable:
    """The task of a schedule, its arguments and its options."""
    return select(schedules.c.task, *CALL).where(NAME)


@cache
def change_schedule(names: tuple[str, ...]) -> Executable:
    """Set these columns of one schedule."""
    return update(schedules).where(NAME).values({name: _value(name) for name in names})


@cache
def pause_schedule() -> Executable:
    """Returns the name if the schedule exists; keeps the time of an earlier pause."""
    paused_at = func.coalesce(schedules.c.paused_at, clock())
    return update(schedules).where(NAME).values(paused_at=paused_at).returning(schedules.c.name)


@cache
def remove_schedule() -> Executable:
    return delete(schedules).where(NAME).returning(schedules.c.name)


@cache
def all_schedules() -> Executable:
    """Every schedule by name, with the time of the database."""
    return select(*STATE, moment(clock()).label("now")).order_by(schedules.c.name)


@cache
def declared_schedules() -> Executable:
    """What the last synchronisation has written of these schedules."""
    return select(
        schedules.c.name,
        schedules.c.application,
        schedules.c.declared_in,
        cast(schedules.c.declaration, Text),
    ).where(schedules.c.name == any_(array_parameter("names", Text)))


@cache
def pause_undeclared() -> Executable:
    """Pause the schedules that these modules of an application have declared before and declare no
    longer.

    One that is paused already stays as it is: should the code declare it again, it stays paused.
    """
    return (
        update(schedules)
        .where(
            schedules.c.paused_at.is_(None),
            schedules.c.application == text_parameter("of_application"),
            schedules.c.declared_in == any_(array_parameter("modules", Text)),
            schedules.c.declaration.is_not(None),
            ~(schedules.c.name == any_(array_parameter("names", Text))),
        )
        .values(paused_at=clock(), declaration=null())
        .returning(schedules.c.name, schedules.c.declared_in)
    )


def _is_known_task() -> ColumnElement[bool]:
    return schedules.c.task == any_(array_parameter("tasks", Text))


def _value(name: str) -> ColumnElement[Any]:
    """The parameter for a column; JSON is sent as text."""
    type_ = schedules.c[name].type
    return cast(bindparam(name, type_=Text if isinstance(type_, JSONB) else type_), type_)
