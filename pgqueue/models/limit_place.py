"""The places in limits that admitted jobs have taken."""

from sqlalchemy import BigInteger
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class LimitPlace(Base):
    """A place that a job took in a limit when it was admitted.

    The job holds the place as long as it has a message in ``message_queue`` or a lease.  After
    that the place is free, whatever ended the job's attempt, and the row is deleted later.  With
    ``fair_by``, a job has a second place under the name of the limit.
    """

    __tablename__ = "limit_places"

    limit_key: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
