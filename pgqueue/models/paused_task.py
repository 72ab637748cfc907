"""The tasks that are paused."""

from datetime import datetime

from sqlalchemy import text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class PausedTask(Base):
    """A task whose jobs no worker starts; enqueuing continues."""

    __tablename__ = "paused_tasks"

    task: Mapped[str] = mapped_column(primary_key=True)
    paused_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
