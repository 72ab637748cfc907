"""What handlers have recorded of their steps."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Index, SmallInteger, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class StepKind(StrEnum):
    """What a record is of."""

    STEP = "step"
    """A call of a function."""
    SLEEP = "sleep"
    """A sleep; it is over at ``finished_at``."""
    EACH = "each"
    """The rows of a query; its result is the key of the last row that is done."""
    WAIT = "wait"
    """A wait for a signal; without a result until it has received one, or its time is over."""
    GATHER = "gather"
    """Jobs that the handler has enqueued, whose end it waits for as for a signal."""


class JobStep(Base):
    """What is on record of a step of a handler, which later attempts do not run again.

    The row goes with the job.
    """

    __tablename__ = "job_steps"
    __table_args__: Any = (
        CheckConstraint(f"kind IN {tuple(map(str, StepKind))}", name="job_steps_kind"),
        Index(
            "job_steps_signal",
            "signal",
            "key",
            postgresql_where=text("signal IS NOT NULL AND result IS NULL"),
        ),
    )

    job_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    """A :class:`StepKind`."""
    result: Mapped[Any] = mapped_column(JSONB(none_as_null=True), nullable=True)
    attempt: Mapped[int] = mapped_column(SmallInteger)
    """The attempt that has written it."""
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    """In the future while the job sleeps or waits; NULL before the last row of a query, and while
    a wait has no timeout."""
    signal: Mapped[str | None]
    """The name of the signal for which the job waits."""
    key: Mapped[str | None]
    """The key of this signal."""
