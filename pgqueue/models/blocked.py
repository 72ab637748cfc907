"""What waits for the end of other jobs."""

from typing import Any

from sqlalchemy import BigInteger, Index
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class Blocked(Base):
    """A batch that has not ended, or a job that waits for other jobs or for a batch.

    Both are nodes: a job is named by its id, a batch by its id with a minus sign.  Each node
    watches one unfinished node, and nothing counts the others.  A worker deletes the row when
    nothing is left to wait for.
    """

    __tablename__ = "blocked"
    __table_args__: Any = (Index("blocked_waits_for", "waits_for", "node_id"),)

    node_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    waits_for: Mapped[int] = mapped_column(BigInteger)
    """The node that it watches.  It was unfinished when a worker last looked."""


class Dependency(Base):
    """A job, and a node that ends before the job starts.  A row stays as long as the job, or as
    the batch for which it waits."""

    __tablename__ = "dependencies"
    __table_args__: Any = (Index("dependencies_after_id", "after_id"),)

    job_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    after_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
