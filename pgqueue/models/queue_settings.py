"""The settings of queues."""

from datetime import datetime

from sqlalchemy import CheckConstraint
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base, times_in_range


class QueueSettings(Base):
    """The settings of one queue; a queue without a row is not paused."""

    __tablename__ = "queues"
    __table_args__ = (CheckConstraint(times_in_range("paused_at"), name="queues_times"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    paused_at: Mapped[datetime | None]
    """While set, workers skip the queue; enqueuing continues."""
