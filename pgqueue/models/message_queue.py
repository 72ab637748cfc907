"""The dispatch table: one narrow row for each attempt that may start."""

from datetime import datetime

from sqlalchemy import BigInteger, Identity, text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Attempts, Base, Priority


class MessageQueue(Base):
    """One runnable attempt: job ``target_id`` may start from ``run_at``.

    Rows are inserted and deleted, never updated.  The primary key is the claim order and the
    only index: a claim reaches its messages by one index scan per (queue, priority).
    """

    __tablename__ = "message_queue"

    queue: Mapped[str] = mapped_column(primary_key=True)
    priority: Mapped[int] = mapped_column(Priority, primary_key=True, autoincrement=False)
    run_at: Mapped[datetime] = mapped_column(primary_key=True)
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)

    target_id: Mapped[int] = mapped_column(BigInteger)
    task: Mapped[str]
    """Copied from the job, so that a worker claims only tasks that it knows."""

    attempt: Mapped[int] = mapped_column(Attempts, server_default=text("0"))
    """Attempts used up so far; this message permits the next one."""

    crashes: Mapped[int] = mapped_column(Attempts, server_default=text("0"))
    """How many attempts have crashed their worker."""

    alone: Mapped[bool] = mapped_column(server_default=text("false"))
    """Not claimed ahead of a free slot: a crash of the worker would cost this job too much."""
