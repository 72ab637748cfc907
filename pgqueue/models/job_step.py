"""What handlers have recorded of their steps."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, SmallInteger, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base, times_in_range


class JobStep(Base):
    """A step of a handler that has ended, which later attempts do not run again.

    The row goes with the job.
    """

    __tablename__ = "job_steps"
    __table_args__ = (CheckConstraint(times_in_range("finished_at"), name="job_steps_times"),)

    job_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(primary_key=True)
    result: Mapped[Any] = mapped_column(JSONB(none_as_null=True), nullable=True)
    attempt: Mapped[int] = mapped_column(SmallInteger)
    """The attempt that has recorded it."""
    finished_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
