"""The tasks that workers know, for those who enqueue without the code."""

from typing import Any

from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class DeclaredTask(Base):
    """What an enqueue by name has to know of a task.

    A worker writes the tasks of its code when it starts.  The function ``pgqueue.enqueue`` reads
    them.
    """

    __tablename__ = "tasks"

    name: Mapped[str] = mapped_column(primary_key=True)
    declaration: Mapped[dict[str, Any]]
    """Queue, priority, max_attempts and meta of its jobs, and what their keys are made of."""
