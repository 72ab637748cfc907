"""The settings of queues."""

from datetime import datetime

from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class QueueSettings(Base):
    """The settings of one queue; a queue without a row is not paused.  The row ``*`` is for all."""

    __tablename__ = "queues"

    name: Mapped[str] = mapped_column(primary_key=True)
    paused_at: Mapped[datetime | None]
    """While set, workers skip the queue; enqueuing continues."""
