"""What waits for the end of other jobs."""

from sqlalchemy import BigInteger, Index, Text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class Blocked(Base):
    """A batch that has not ended, or a callback that waits for its batch.

    Both are nodes: a job is named by its id, a batch by its id with a minus sign.  Each node
    watches one unfinished node, and nothing counts the others.  A worker deletes the row when
    nothing is left to wait for.
    """

    __tablename__ = "blocked"
    __table_args__ = (Index("blocked_waits_for", "waits_for"),)

    node_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    waits_for: Mapped[int] = mapped_column(BigInteger)
    """The node that it watches.  It was unfinished when a worker last looked."""
    runs_when: Mapped[list[str] | None] = mapped_column(ARRAY(Text))
    """Of a callback, the outcomes of its batch with which it runs; otherwise it is deleted."""
