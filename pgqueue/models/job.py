"""The job: one call of one task, the durable record."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Identity, Index, SmallInteger, inspect, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, column_property, foreign, mapped_column, relationship

from pgqueue.models.base import Base, Ended, MaxAttempts, Priority
from pgqueue.models.job_attempt import JobAttempt
from pgqueue.models.job_status import StatusComparator, status_of
from pgqueue.models.states import JobStatus

DEFAULT_QUEUE = "default"
DEFAULT_PRIORITY = 5
DEFAULT_MAX_ATTEMPTS = 10


class Job(Base):
    """One call of one task.

    Written when it is enqueued, when an attempt fails, and when it ends.  The last update is
    HOT: the migration sets a fill factor that leaves room in the page, and no index contains a
    column that changes then.

    Create one with ``task.enqueue(...)`` or ``task.job(...)``: a ``Job()`` that you construct and
    add has no message, so no worker runs it, and ``queue.check`` reports it.
    """

    __tablename__ = "jobs"
    # What the database chooses is read by the statement that inserts the message.
    __mapper_args__: Any = {"eager_defaults": False}

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    queue: Mapped[str] = mapped_column(server_default=DEFAULT_QUEUE)
    task: Mapped[str]
    args: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """The arguments, keyed by parameter name, in their JSON form."""

    priority: Mapped[int] = mapped_column(Priority, server_default=text(str(DEFAULT_PRIORITY)))
    """0 runs first, 9 last."""

    run_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    """Equal to ``run_at`` of the current message: the job does not start earlier."""

    max_attempts: Mapped[int] = mapped_column(
        MaxAttempts, server_default=text(str(DEFAULT_MAX_ATTEMPTS))
    )
    attempts: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    snoozes: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    interruptions: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    """Attempts that a stopping worker interrupted; they do not count as attempts."""

    outcome: Mapped[str | None] = mapped_column(Ended)
    """NULL until the job ends, then succeeded, failed or cancelled."""

    result: Mapped[Any] = mapped_column(JSONB(none_as_null=True), nullable=True)
    last_error: Mapped[str | None]
    """The error message of the attempt that failed last, or the type of an exception without a
    message, or the reason why the job waits as an :class:`UnreadableJob`; NULL if the job has
    succeeded.  :class:`JobAttempt` has the errors of all attempts."""

    unique_key: Mapped[str | None]
    held_unique_key: Mapped[str | None]
    """The unique key while the job is unfinished; NULL when the key is free again, as a rule after
    the end of the job."""

    limit_keys: Mapped[str | None] = mapped_column()
    """The keys of the limits that the job is under, one a line; NULL if there are none."""

    tags: Mapped[list[str] | None]
    meta: Mapped[dict[str, Any] | None]
    progress: Mapped[dict[str, Any] | None]
    """What the handler last reported: ``done``, ``total`` and ``note``."""

    created_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    """Set by ``queue.cancel`` while an attempt runs: the job ends as cancelled, however the attempt
    ends."""
    kill_requested_at: Mapped[datetime | None]
    """Set by ``queue.cancel(..., kill=True)``: the child process of a running handler is killed."""

    status: Mapped[JobStatus] = column_property(
        status_of(id, outcome, queue, priority, run_at, limit_keys),
        comparator_factory=StatusComparator,
    )

    failed_attempts: Mapped[list[JobAttempt]] = relationship(
        primaryjoin=lambda: Job.id == foreign(JobAttempt.job_id),
        order_by=(JobAttempt.message_id, JobAttempt.attempt),
        viewonly=True,
    )
    """The attempts that did not succeed, oldest first; loaded when it is read."""

    is_new: bool = False
    """Whether the last enqueue that returned this object has created the job.

    Not a column: False for a job that was loaded by a query.
    """

    __table_args__: Any = (
        CheckConstraint("(outcome IS NULL) = (finished_at IS NULL)", name="jobs_finished_at"),
        Index(
            "jobs_held_unique_key",
            "queue",
            "held_unique_key",
            unique=True,
            postgresql_where=text("held_unique_key IS NOT NULL"),
        ),
        # The keys of Unique(across="queues"), which begin so; few or no jobs have one.
        Index(
            "jobs_held_unique_key_across",
            "held_unique_key",
            unique=True,
            postgresql_where=text("pg_catalog.starts_with(held_unique_key, 'pgqueue.across:')"),
        ),
    )

    def __repr__(self) -> str:
        """Name the job without its arguments, which may be secret; sends no query."""
        # The identity is known even after a commit has expired all attributes.
        identity = inspect(self, raiseerr=True).identity
        id = self.__dict__.get("id") if identity is None else identity[0]
        known = (str(id or "(new)"), self.__dict__.get("task"))
        return f"<Job {' '.join(word for word in known if word)}>"
