"""The failed attempts."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import BigInteger, SmallInteger, text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class JobAttempt(Base):
    """One unsuccessful attempt: its error, where it was raised, and when."""

    __tablename__ = "job_attempts"

    job_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    message_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    attempt: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)

    outcome: Mapped[str]
    """One of :class:`pgqueue.outcomes.AttemptEnd`."""

    error_type: Mapped[str | None]
    error: Mapped[str | None]
    traceback: Mapped[str | None]
    worker_id: Mapped[UUID | None]
    moved_to: Mapped[str | None]
    """The queue to which the retry has moved the job; NULL if it has stayed in its queue."""

    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
