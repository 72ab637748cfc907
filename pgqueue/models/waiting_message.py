"""The messages of jobs that wait for room in their limits."""

from datetime import datetime

from sqlalchemy import BigInteger, text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Attempts, Base, Priority


class WaitingMessage(Base):
    """One job that has not been admitted: a worker moves this row to ``message_queue``.

    The primary key is the order of admission among the jobs that are under the same limits.  A
    transaction that writes or deletes a row has inserted its job, or has locked the job's row.
    """

    __tablename__ = "waiting_messages"

    limit_keys: Mapped[str] = mapped_column(primary_key=True)
    """The keys of all limits of the job, one a line, as in the job's row."""

    queue: Mapped[str] = mapped_column(primary_key=True)
    priority: Mapped[int] = mapped_column(Priority, primary_key=True, autoincrement=False)
    run_at: Mapped[datetime] = mapped_column(primary_key=True)
    target_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)

    task: Mapped[str]
    attempt: Mapped[int] = mapped_column(Attempts, server_default=text("0"))
    """Attempts used up so far."""

    crashes: Mapped[int] = mapped_column(Attempts, server_default=text("0"))
