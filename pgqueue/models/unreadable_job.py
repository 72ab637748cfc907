"""The jobs whose arguments no worker could read so far."""

from datetime import datetime

from sqlalchemy import BigInteger, text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class UnreadableJob(Base):
    """One job with arguments that do not fit the task's parameters in the worker's code.

    During a deployment, newer code enqueues jobs that older workers cannot run.  Such a job waits
    for a worker that can.  The row goes with the next attempt that does not succeed, or with the
    job; until then it records when the job was first met.  Ignore the rows of jobs that have ended
    or run.
    """

    __tablename__ = "unreadable_jobs"

    job_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    task: Mapped[str]
    reason: Mapped[str]
    """The error message of the worker that met the job first."""
    since: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
