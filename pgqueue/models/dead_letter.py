"""The jobs that have ended without success."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class DeadLetter(Base):
    """One job that ended as failed or cancelled.

    A separate table, because an index on ``jobs.outcome`` would prevent the HOT update of every
    success.
    """

    __tablename__ = "dead_letters"
    __table_args__: Any = (
        CheckConstraint("outcome IN ('failed', 'cancelled')", name="dead_letters_outcome"),
        Index("dead_letters_by_outcome", "outcome", "job_id"),
        Index("dead_letters_by_task", "task", "job_id"),
        Index(
            "dead_letters_by_error",
            "fingerprint",
            "job_id",
            postgresql_where=text("fingerprint IS NOT NULL"),
        ),
    )

    job_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    outcome: Mapped[str]
    queue: Mapped[str]
    task: Mapped[str]
    finished_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    fingerprint: Mapped[int | None] = mapped_column(BigInteger)
    """The error that has failed the job, as :class:`ErrorGroup` has it; NULL for a cancelled job,
    and for one that code of an older version has ended."""
