"""The errors of attempts, those of one kind together."""

from datetime import datetime

from sqlalchemy import BigInteger, text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class ErrorGroup(Base):
    """The failed attempts of one task with errors of one type from one place in the code.

    Written by workers every ten seconds, as :class:`TaskMinute`.  The failed jobs with this
    fingerprint are in :class:`DeadLetter`.
    """

    __tablename__ = "error_groups"

    fingerprint: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    """A hash of ``error_type`` and ``place``."""
    task: Mapped[str] = mapped_column(primary_key=True)

    error_type: Mapped[str]
    place: Mapped[str]
    """The functions of the application through which the error was raised, the handler first."""

    attempts: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    """How many attempts have failed so, since ``first_at``."""
    first_at: Mapped[datetime]
    last_at: Mapped[datetime]
    first_version: Mapped[str] = mapped_column(server_default=text("''"))
    """The version of the application in which the error occurred first; empty if it has none."""

    job_id: Mapped[int] = mapped_column(BigInteger)
    """The job of the last such attempt; it may have been deleted since."""
    message: Mapped[str]
    """The error message of that attempt, shortened; secrets are masked."""
    muted_until: Mapped[datetime | None]
    """Until then, the dashboard leaves the group out of the list of problems."""
