"""A job in a list."""

from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa

from pgqueue.models import Job, JobStatus
from pgqueue.repository.reading import readable


class JobLine(NamedTuple):
    """A job in a list, without its arguments and its result: these may be large and secret."""

    id: int
    status: JobStatus
    task: str
    queue: str
    priority: int
    attempts: int
    max_attempts: int
    run_at: datetime
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    last_error: str | None


def columns_of_line() -> list[sa.ColumnElement[Any]]:
    """What to select for a line, in its order."""
    return [readable(getattr(Job, name)) for name in JobLine._fields]
