"""The worker processes, each with its last heartbeat."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import BigInteger, Integer, SmallInteger, text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class WorkerProcess(Base):
    """One start of one worker process.  The id is random, because a new process may have the
    same host name."""

    __tablename__ = "workers"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    hostname: Mapped[str]
    pid: Mapped[int] = mapped_column(Integer)
    backend_pid: Mapped[int] = mapped_column(Integer)
    """The server process of the heartbeat connection, which holds the advisory lock."""

    queues: Mapped[list[str]]
    """Empty: an operator has made the worker quiet, and it claims no more jobs."""

    withheld_queues: Mapped[list[str] | None]
    """The queues of a quiet worker, to give them back."""

    slots: Mapped[int] = mapped_column(SmallInteger)
    started_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    heartbeat_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    dead_at: Mapped[datetime | None]
    """Set by a rescuer.  From then on this worker can neither send heartbeats nor claim."""

    attempts_ended: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    """How many attempts the process has ended, until the last heartbeat."""

    version: Mapped[str | None]
    """Of the application, as ``PgQueue(version=...)`` names it."""
