"""Notes the jobs that are enqueued through a Session while a batch is open on it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sqlalchemy.orm import Session

COLLECTING = "pgqueue.collecting"
"""The name in ``session.info`` of the jobs that are being collected."""


@dataclass(frozen=True, slots=True)
class Collecting:
    """The jobs of a batch."""

    batch_id: int
    job_ids: list[int] = field(default_factory=list)


@contextmanager
def collected(session: Session, batch_id: int) -> Iterator[list[int]]:
    """A list to which all jobs are added that the block enqueues through this session.

    A block inside of another collects for itself.
    """
    collecting = Collecting(batch_id)
    before = session.info.get(COLLECTING)
    session.info[COLLECTING] = collecting
    try:
        yield collecting.job_ids
    finally:
        session.info[COLLECTING] = before


def batch_of(session: Session | None) -> int | None:
    """The batch to which the jobs belong that are enqueued through this session now."""
    if session is None or (collecting := session.info.get(COLLECTING)) is None:
        return None
    batch_id: int = collecting.batch_id
    return batch_id


def note_for_batch(session: Session | None, job_ids: Iterable[int]) -> None:
    """Note jobs that were enqueued through a session, or that hold the unique key of one."""
    if session is not None and (collecting := session.info.get(COLLECTING)) is not None:
        collecting.job_ids.extend(job_ids)
