"""The switches of queues."""

from datetime import datetime

from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class QueueSettings(Base):
    """The switches of one queue; a queue without a row has none thrown."""

    __tablename__ = "queues"

    name: Mapped[str] = mapped_column(primary_key=True)
    paused_at: Mapped[datetime | None]
    """While set, workers pass the queue by; enqueuing goes on."""
