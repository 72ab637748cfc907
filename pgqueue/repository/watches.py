"""What a process that waits for jobs tells the workers, and what these tell it.

Both are notifications with the ids of jobs, on channels of their own, and both are hints: who waits
also reads the rows from time to time.  Only a job for which somebody waits is told of, so no other
job costs anything.
"""

from collections.abc import Collection, Iterable
from functools import cache

import sqlalchemy as sa

from pgqueue.repository.tables import (
    CHANNEL,
    Executor,
    array_of,
    array_parameter,
    given_ids,
    jobs,
    pg,
)

WATCHES = f"{CHANNEL}_watches"
"""The channel on which the jobs are announced for which somebody waits."""
ENDS = f"{CHANNEL}_ends"
"""The channel on which workers tell that such jobs may have ended."""

IDS_IN_A_NOTIFICATION = 400
"""PostgreSQL refuses a payload of 8000 bytes, and an id has up to 19 digits."""


@cache
def tell(channel: str) -> sa.Executable:
    words = pg.unnest(array_parameter("words", sa.Text))
    word = words.table_valued(sa.column("word", sa.Text)).render_derived(name="given")
    return sa.select(pg.pg_notify(sa.literal_column(f"'{channel}'"), word.c.word))


@cache
def ended_jobs() -> sa.Executable:
    """Which of these jobs have ended, or do not exist."""
    given = given_ids("job_ids")
    unfinished = sa.select(jobs.c.id).where(jobs.c.id == given.c.id, jobs.c.outcome.is_(None))
    return sa.select(given.c.id).where(~unfinished.exists())


class Watches:
    """The jobs for which somebody waits, behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def announce(self, job_ids: Collection[int]) -> None:
        """Let the workers tell when one of these jobs ends."""
        self._tell(WATCHES, job_ids)

    def tell_ended(self, job_ids: Collection[int]) -> None:
        """Tell who waits for one of these jobs to read it again."""
        self._tell(ENDS, job_ids)

    def ended_among(self, job_ids: Iterable[int]) -> list[int]:
        """Those of these jobs that have ended, or do not exist."""
        given = {"job_ids": array_of(map(str, job_ids))}
        return list(self._executor.execute(ended_jobs(), given).scalars())

    def _tell(self, channel: str, job_ids: Collection[int]) -> None:
        ids = [str(job_id) for job_id in job_ids]
        size = IDS_IN_A_NOTIFICATION
        words = [",".join(ids[at : at + size]) for at in range(0, len(ids), size)]
        self._executor.execute(tell(channel), {"words": array_of(words)})


def ids_in(payload: str) -> list[int]:
    """The ids in a notification; any role may send one, with any text."""
    return [int(word) for word in payload.split(",") if len(word) < 20 and word.isdecimal()]
