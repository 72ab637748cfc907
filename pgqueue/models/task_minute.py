"""How attempts have ended, by task and minute."""

from datetime import datetime

from sqlalchemy import Integer, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base

ZERO = text("0")
NO_DURATIONS = text("'{}'")


class TaskMinute(Base):
    """The attempts of one task that ended in one minute, by the clock of PostgreSQL.

    Workers count in memory and add to the rows every ten seconds, so the numbers are those of the
    last write; a worker that is killed loses what it has not written.  The numbers of jobs in the
    other tables are exact.

    After three hours, ten minutes are added up in one row; after 25 hours, an hour is one.
    """

    __tablename__ = "task_minutes"

    at: Mapped[datetime] = mapped_column(primary_key=True)
    """The beginning of the minute, or of the ten or sixty."""
    task: Mapped[str] = mapped_column(primary_key=True)

    succeeded: Mapped[int] = mapped_column(Integer, server_default=ZERO)
    failed: Mapped[int] = mapped_column(Integer, server_default=ZERO)
    """Attempts after which their jobs have failed for good."""
    retried: Mapped[int] = mapped_column(Integer, server_default=ZERO)
    """Attempts that failed, and whose jobs are retried."""
    cancelled: Mapped[int] = mapped_column(Integer, server_default=ZERO)
    other: Mapped[int] = mapped_column(Integer, server_default=ZERO)
    """Attempts that count towards no ``max_attempts``: snoozed, interrupted, unreadable."""

    ran: Mapped[list[int]] = mapped_column(ARRAY(Integer), server_default=NO_DURATIONS)
    """How long handlers ran: the first number counts attempts of less than a millisecond, each
    further one those of less than twice the time before.  Of many quick attempts, some are
    measured, and each counts for several."""
    waited: Mapped[list[int]] = mapped_column(ARRAY(Integer), server_default=NO_DURATIONS)
    """The same of the time from when a job was due to the start of its handler."""
