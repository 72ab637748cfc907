"""The cold tables: who works, what is switched off, which version the tables have."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import CheckConstraint, Integer, SmallInteger, text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class WorkerProcess(Base):
    """One start of one worker process.  The id is random: a host name that comes back is not
    the process that left."""

    __tablename__ = "workers"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    hostname: Mapped[str]
    pid: Mapped[int] = mapped_column(Integer)
    backend_pid: Mapped[int] = mapped_column(Integer)
    """The server process of the connection that beats and holds the advisory lock."""

    queues: Mapped[list[str]]
    slots: Mapped[int] = mapped_column(SmallInteger)
    started_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    heartbeat_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    dead_at: Mapped[datetime | None]
    """Set by a rescuer.  From then on this id neither beats nor claims."""


class QueueSettings(Base):
    """The switches of one queue; a queue without a row has none thrown."""

    __tablename__ = "queues"

    name: Mapped[str] = mapped_column(primary_key=True)
    paused_at: Mapped[datetime | None]
    """While set, workers pass the queue by; enqueuing goes on."""


class SchemaVersion(Base):
    """The one row that says which revision the tables have, whichever history brought it."""

    __tablename__ = "schema_version"
    __table_args__ = (CheckConstraint("only_row", name="schema_version_only_row"),)

    only_row: Mapped[bool] = mapped_column(primary_key=True, server_default=text("true"))
    version: Mapped[int] = mapped_column(Integer)
    oldest_code: Mapped[int] = mapped_column(Integer)
    """The lowest version a running worker may have been written for."""
