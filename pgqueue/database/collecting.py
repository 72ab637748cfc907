"""Notes the jobs that are enqueued through a Session while a batch is open on it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy.orm import Session

from pgqueue.models import Job

COLLECTING = "pgqueue.collecting"
"""The name in ``session.info`` of the ids that are being collected."""

T = TypeVar("T", bound=Job)


@contextmanager
def collected(session: Session) -> Iterator[list[int]]:
    """A list to which all jobs are added that the block enqueues through this session.

    A block inside of another collects for itself.
    """
    job_ids: list[int] = []
    before = session.info.get(COLLECTING)
    session.info[COLLECTING] = job_ids
    try:
        yield job_ids
    finally:
        session.info[COLLECTING] = before


def note_for_batch(session: Session | None, job_ids: Iterable[int]) -> None:
    """Note jobs that were enqueued through a session, or that hold the unique key of one."""
    if session is not None and (collecting := session.info.get(COLLECTING)) is not None:
        collecting.extend(job_ids)
