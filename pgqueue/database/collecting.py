"""Notes the jobs that are enqueued through a Session, for the batches that are being filled."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection
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


def collecting_of(session: Session | Connection | None) -> Collecting | None:
    """What collects the jobs that are enqueued through this session now."""
    return session.info.get(COLLECTING) if isinstance(session, Session) else None
