"""The leases of running attempts."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, SmallInteger, text
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class Lease(Base):
    """One running attempt, and the right of one worker to finish it.

    The row is the fence: every write of a worker names all of (target_id, message_id, attempt,
    worker_id), and finds no row once another worker has the lease.
    """

    __tablename__ = "leases"
    __table_args__: Any = (
        CheckConstraint("attempt BETWEEN 1 AND 32000", name="leases_attempt"),
        CheckConstraint("crashes BETWEEN 0 AND 32000", name="leases_crashes"),
    )

    target_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    message_id: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int] = mapped_column(SmallInteger)
    crashes: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    worker_id: Mapped[UUID]

    held: Mapped[bool] = mapped_column(server_default=text("false"))
    """Always false: no longer written."""

    started_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
