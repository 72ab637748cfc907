"""Notes the jobs that are enqueued through a Session, for the batches that are being filled."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.orm import Session

COLLECTING = "pgqueue.collecting"
"""The name in ``session.info`` of the jobs that are being collected."""


@dataclass(frozen=True, slots=True)
class Collecting:
    """What the block of a batch gives the jobs that it enqueues, and their ids."""

    meta: Mapping[str, Any]
    """What their meta notes."""
    after: tuple[int, ...] = ()
    """The nodes that end before these jobs start."""
    job_ids: list[int] = field(default_factory=list)


@contextmanager
def collected(session: Session, collecting: Collecting) -> Iterator[None]:
    """Collect all jobs that the block enqueues through this session.

    A block inside of another collects for itself.
    """
    before = session.info.get(COLLECTING)
    session.info[COLLECTING] = collecting
    try:
        yield
    finally:
        session.info[COLLECTING] = before


def collecting_of(session: Session | None) -> Collecting | None:
    """What collects the jobs that are enqueued through this session now."""
    return None if session is None else session.info.get(COLLECTING)


def note_for_batch(session: Session | None, job_ids: Iterable[int]) -> None:
    """Note jobs that were enqueued through a session, or that hold the unique key of one."""
    if (collecting := collecting_of(session)) is not None:
        collecting.job_ids.extend(job_ids)
