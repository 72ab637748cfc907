"""The narrow tables a worker lives on: messages and leases; and what failed attempts leave."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, Identity, Index, SmallInteger, text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import STARTS_IN_TIME, Base


class MessageQueue(Base):
    """One runnable attempt: job ``target_id`` may start from ``run_at``.

    Inserted and deleted, never updated.  The primary key is the order of the claim and the
    only index: a claim reaches its messages by one index scan per (queue, priority).
    """

    __tablename__ = "message_queue"
    # One row that a claim cannot count on would fail the claim of all: they are refused here.
    # A crash may add to an attempt that was the last, hence the room above jobs.max_attempts.
    __table_args__ = (
        CheckConstraint("priority BETWEEN 0 AND 9", name="message_queue_priority"),
        CheckConstraint(STARTS_IN_TIME, name="message_queue_run_at"),
        CheckConstraint("attempt BETWEEN 0 AND 31000", name="message_queue_attempt"),
        CheckConstraint("crashes BETWEEN 0 AND 31000", name="message_queue_crashes"),
    )

    queue: Mapped[str] = mapped_column(primary_key=True)
    priority: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    run_at: Mapped[datetime] = mapped_column(primary_key=True)
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)

    target_id: Mapped[int] = mapped_column(BigInteger)
    task: Mapped[str]
    """Copied from the job, so that a worker claims only the tasks it knows."""

    attempt: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    """Attempts already used up; the attempt this message permits is the next one."""

    crashes: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    """How often an attempt took its worker down with it."""

    alone: Mapped[bool] = mapped_column(server_default=text("false"))
    """Never claimed ahead of a free slot: the death of its worker would cost it too much."""


class Lease(Base):
    """One running attempt, and the right of one worker to finish it.

    The row itself is the fence: every write of a worker names all of (target_id, message_id,
    attempt, worker_id), and finds nothing once the lease has passed to another.
    """

    __tablename__ = "leases"
    __table_args__ = (
        CheckConstraint("attempt BETWEEN 1 AND 32000", name="leases_attempt"),
        CheckConstraint("crashes BETWEEN 0 AND 32000", name="leases_crashes"),
    )

    target_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    message_id: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int] = mapped_column(SmallInteger)
    crashes: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    worker_id: Mapped[UUID]

    held: Mapped[bool] = mapped_column(server_default=text("false"))
    """Transaction mode: settled only by the transaction that holds the message."""

    started_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))


class JobAttempt(Base):
    """One attempt that did not end well: what was raised, where, and when."""

    __tablename__ = "job_attempts"

    job_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    message_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    attempt: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)

    outcome: Mapped[str]
    """One of :class:`pgqueue.outcomes.AttemptEnd`."""

    error_type: Mapped[str | None]
    error: Mapped[str | None]
    traceback: Mapped[str | None]
    worker_id: Mapped[UUID | None]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))


class DeadLetter(Base):
    """One job that ended failed or cancelled.

    Kept apart because an index on ``jobs.outcome`` would cost every success its HOT update.
    """

    __tablename__ = "dead_letters"
    __table_args__ = (
        CheckConstraint("outcome IN ('failed', 'cancelled')", name="dead_letters_outcome"),
        Index("dead_letters_by_outcome", "outcome", "job_id"),
    )

    job_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    outcome: Mapped[str]
    queue: Mapped[str]
    task: Mapped[str]
    finished_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
