"""Batches: sets of jobs whose end starts one more job.  A workflow is one, and so is a group."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Identity, Index, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base, Ended


class Batch(Base):
    """A set of jobs, which ends with the last of them.

    An open batch and each of its callbacks have a row in ``blocked``.  The worker that ends the
    batch sees that no job is unfinished, writes ``ended_at`` and deletes the row.  The callback is
    released in a later transaction.
    """

    __tablename__ = "batches"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    name: Mapped[str | None]
    meta: Mapped[dict[str, Any] | None]
    """What the application has noted, for the callback and for its queries."""

    created_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))

    outcome: Mapped[str | None] = mapped_column(Ended)
    """NULL until the batch ends, then failed if a job of it has failed, else cancelled if one was
    cancelled, else succeeded."""
    total: Mapped[int | None] = mapped_column(BigInteger)
    """How many jobs the batch had when it ended; NULL before, as the two below."""
    failed: Mapped[int | None] = mapped_column(BigInteger)
    cancelled: Mapped[int | None] = mapped_column(BigInteger)
    callback_id: Mapped[int | None] = mapped_column(BigInteger)
    """The job that starts after the batch; it may have been deleted since."""
    ended_at: Mapped[datetime | None]
    counted: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    """The progress of an open batch when a worker last counted it."""
    count_at: Mapped[datetime | None]
    """When a worker is to count it again; NULL before the first time."""
    application: Mapped[str] = mapped_column(server_default=text("''"))
    """The application whose workers delete the batch; empty for one without a name."""
    is_workflow: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether its jobs may wait for each other, and a requeue of one opens it again."""
    deadline_at: Mapped[datetime | None]
    """When workers cancel what has not ended of it; NULL without a deadline."""
    workflow_id: Mapped[int | None] = mapped_column(BigInteger)
    """Of a group of jobs, the workflow to which they belong."""

    __table_args__: Any = (
        CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name="batches_ended_at"),
        Index("batches_open", "id", postgresql_where=text("ended_at IS NULL")),
        Index(
            "batches_deadline_at",
            "deadline_at",
            postgresql_where=text("deadline_at IS NOT NULL AND ended_at IS NULL"),
        ),
        # Of groups only: those of a workflow are found by it.
        Index(
            "batches_workflow_id",
            "workflow_id",
            postgresql_where=text("workflow_id IS NOT NULL"),
        ),
    )


class BatchJob(Base):
    """A job that belongs to a batch.

    A row stays as long as its batch, also if the job has been deleted.
    """

    __tablename__ = "batch_jobs"
    __table_args__: Any = (Index("batch_jobs_job_id", "job_id"),)

    batch_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    job_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
