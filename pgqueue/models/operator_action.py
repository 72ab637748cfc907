"""What operators have done to jobs, queues, limits, schedules and workers."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Identity, Index, Integer, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue.models.base import Base


class OperatorAction(Base):
    """One action of an operator, written in the transaction that changes the jobs.

    An action on all jobs that match a filter works in several transactions.  Each of them changes
    some jobs in the order of their ids and moves ``cursor``, so a process that is killed loses
    nothing, and another one goes on from there.
    """

    __tablename__ = "operator_actions"
    __table_args__: Any = (
        Index(
            "operator_actions_unfinished",
            "id",
            postgresql_where=text("finished_at IS NULL"),
        ),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    actor: Mapped[str]
    """Who has done it: the user of the dashboard, or the user of the system who ran a command."""
    action: Mapped[str]
    """A word, for example ``requeue``, ``cancel`` or ``pause_queue``."""
    target: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default=text("'{}'"))
    """What it was done to: the id of a job, the filter of several, or the name of a queue, task,
    limit, schedule, batch or worker."""
    options: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default=text("'{}'"))
    """How it was done, for example ``spread_s``, the seconds over which jobs are spread."""
    reason: Mapped[str] = mapped_column(server_default=text("''"))
    """What the operator has written about it."""

    jobs: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    """How many jobs were changed up to now."""
    skipped: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    """How many jobs matched and were not changed, because they had moved on."""
    first_ids: Mapped[list[int]] = mapped_column(ARRAY(BigInteger), server_default=text("'{}'"))
    """The ids of the first jobs that were changed, at most 20."""
    before: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    """What was changed, as it was before; NULL where the action says it all."""
    after: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))

    last_id: Mapped[int | None] = mapped_column(BigInteger)
    """Of an action on all jobs that match: the highest id when it began.  Later jobs are left."""
    cursor: Mapped[int | None] = mapped_column(BigInteger)
    """How far an action on all jobs that match has come: the jobs up to this id are done, except
    ``left_ids``."""
    left_ids: Mapped[list[int]] = mapped_column(ARRAY(BigInteger), server_default=text("'{}'"))
    """The jobs up to ``cursor`` that are still to be changed, one by one."""
    finished_at: Mapped[datetime | None]
    """NULL while an action on several jobs is under way."""
