"""How many jobs the queues had, by queue and minute."""

from datetime import datetime

from sqlalchemy import Integer, text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base

ZERO = text("0")


class QueueMinute(Base):
    """The jobs of one queue in one minute, by the clock of PostgreSQL.

    One worker at a time counts the jobs, every ten seconds or more rarely if counting takes long;
    the row has the last count of its minute.  Every worker adds the jobs that it has claimed.

    After three hours, ten minutes are folded into one row, and after 25 hours, an hour is one: with
    the largest number of each column, and the sum of ``started``.
    """

    __tablename__ = "queue_minutes"

    at: Mapped[datetime] = mapped_column(primary_key=True)
    """The beginning of the minute, or of the ten or sixty."""
    queue: Mapped[str] = mapped_column(primary_key=True)
    """Empty in a row without jobs that each count writes."""

    counted_at: Mapped[datetime | None]
    """When the jobs were counted last; NULL, as the next columns, in a minute without a count."""
    waiting: Mapped[int | None] = mapped_column(Integer)
    """Pending jobs, and all those that are not due yet."""
    due: Mapped[int | None] = mapped_column(Integer)
    """Of these, the jobs that are due."""
    blocked: Mapped[int | None] = mapped_column(Integer)
    """Jobs that would be due without their limits."""
    running: Mapped[int | None] = mapped_column(Integer)
    oldest_due_s: Mapped[int | None] = mapped_column(Integer)
    """For how many seconds the oldest due job had been due; NULL if none was."""
    started: Mapped[int] = mapped_column(Integer, server_default=ZERO)
    """Jobs that workers have claimed, first attempts and retries."""
