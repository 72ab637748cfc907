"""The limits that workers know, and their capacities."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import CheckConstraint, Interval, false, text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class LimitSettings(Base):
    """One limit by its name; ``queue.limits`` returns them.

    A worker declares the limits of its code when it starts, so all workers admit by the same
    numbers, whatever version of the code each of them runs.
    """

    __tablename__ = "limits"
    __table_args__: Any = (
        CheckConstraint("declared >= 0", name="limits_declared"),
        CheckConstraint("capacity >= 0", name="limits_capacity"),
        CheckConstraint("period BETWEEN '1 millisecond' AND '366 days'", name="limits_period"),
        CheckConstraint("burst BETWEEN 1 AND 1000000", name="limits_burst"),
        CheckConstraint("burst * period <= '36525 days'", name="limits_refill"),
    )

    name: Mapped[str] = mapped_column(primary_key=True)
    declared: Mapped[int]
    """The capacity in the code of the worker that has started last: jobs at once, or with
    ``period`` starts in it."""

    capacity: Mapped[int | None]
    """Set by ``queue.set_limit``; takes precedence over ``declared``."""

    is_strict: Mapped[bool] = mapped_column(server_default=false())
    skips_failed: Mapped[bool] = mapped_column(server_default=false())
    declared_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))

    period: Mapped[timedelta | None] = mapped_column(Interval)
    """NULL if the limit counts jobs at once."""

    burst: Mapped[int | None]
    """How many jobs of a rate may start at once after a pause."""

    is_fair: Mapped[bool] = mapped_column(server_default=false())
    """Whether the row stands for ``fair_by`` of a task: its keys take turns."""
