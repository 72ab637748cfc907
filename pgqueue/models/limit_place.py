"""The places in limits that admitted jobs have taken."""

from sqlalchemy import BigInteger, Identity
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class LimitPlace(Base):
    """A place that a job took in a limit when it was admitted.

    The job holds the place as long as it has a message in ``message_queue`` or a lease.  After
    that the place is free, whatever ended the job's attempt, and the row is deleted later.  With
    ``fair_by``, a job has a second place under the name of the limit.

    Only admissions insert rows, one admission after the other, so a new row of a key has a greater
    ``id`` than every row that an earlier admission has seen.
    """

    __tablename__ = "limit_places"

    limit_key: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    job_id: Mapped[int] = mapped_column(BigInteger)
