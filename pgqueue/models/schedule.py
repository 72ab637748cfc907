"""The schedules: rules by which workers enqueue jobs at certain times."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Index, Interval, SmallInteger, text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class Schedule(Base):
    """One rule, the task to which it belongs, and the tick at which it stands.

    A *tick* is a time at which the rule enqueues a job.  The worker that fires a tick locks the
    row, inserts the job and moves the row past the tick in one transaction, so each tick has one
    job.  Read the rows as you like; write them with the methods of ``queue.schedules``.
    """

    __tablename__ = "schedules"

    name: Mapped[str] = mapped_column(primary_key=True)
    task: Mapped[str]
    args: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """The arguments, keyed by parameter name, in their JSON form."""
    options: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """The options of the jobs that differ from those of the task."""

    cron: Mapped[str | None]
    """The cron expression, or NULL if the rule is an interval."""
    every: Mapped[timedelta | None] = mapped_column(Interval)
    timezone: Mapped[str] = mapped_column(server_default="UTC")
    """The IANA name of the zone whose clocks the cron expression means."""
    days: Mapped[str] = mapped_column(server_default="or")
    """Whether a day must match the day of the month "or" that of the week, or both: "and"."""
    catch_up: Mapped[int] = mapped_column(SmallInteger, server_default=text("1"))
    """How many missed ticks get a job: 0 for "none", 1 for "last"."""
    overlap: Mapped[str] = mapped_column(server_default="allow")
    """What a tick does while the job of the tick before is unfinished: allow, skip or wait."""

    declared_in: Mapped[str | None]
    """The module whose code declares the schedule; NULL if the application has added the row."""
    declaration: Mapped[dict[str, Any] | None]
    """What the code declared when a worker last synchronised the row: only a changed declaration
    replaces what was changed at run time.  NULL if a worker has paused the schedule because the
    code declares it no longer."""

    next_at: Mapped[datetime | None]
    """The next tick; NULL if the rule has none."""
    last_tick_at: Mapped[datetime | None]
    """The last tick that was fired or passed over: no later tick is at or before this time."""
    last_job_id: Mapped[int | None] = mapped_column(BigInteger)
    """The job of the last tick that was fired; the job may have been deleted since."""
    paused_at: Mapped[datetime | None]
    """While set, no tick is fired."""
    created_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    application: Mapped[str] = mapped_column(server_default=text("''"))
    """The application whose workers write and pause the schedule; empty for one without a name."""

    __table_args__: Any = (
        CheckConstraint("(cron IS NULL) <> (every IS NULL)", name="schedules_rule"),
        CheckConstraint("every BETWEEN '1 second' AND '36525 days'", name="schedules_every"),
        CheckConstraint("days IN ('or', 'and')", name="schedules_days"),
        CheckConstraint("catch_up BETWEEN 0 AND 1000", name="schedules_catch_up"),
        CheckConstraint("overlap IN ('allow', 'skip', 'wait')", name="schedules_overlap"),
        CheckConstraint("next_at > last_tick_at", name="schedules_tick"),
        Index("schedules_next_tick", "next_at", "name", postgresql_where=text("paused_at IS NULL")),
    )
