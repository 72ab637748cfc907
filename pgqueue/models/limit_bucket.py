"""The token buckets of rates."""

from datetime import datetime
from typing import Any

from sqlalchemy import Index
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class LimitBucket(Base):
    """The token bucket of one key of a rate, while it is not full.

    Each start that is admitted moves ``full_at`` by one spacing: a new row replaces the old one.
    So the newest row is the last of its key in the index, and a read of it passes no dead entries.
    A row whose time has passed says the same as no row, and is deleted later.
    """

    __tablename__ = "limit_buckets"
    __table_args__: Any = (Index("limit_buckets_full_at", "full_at"),)

    limit_key: Mapped[str] = mapped_column(primary_key=True)

    full_at: Mapped[datetime] = mapped_column(primary_key=True)
    """When the bucket is full again, if no other job starts until then."""
