"""The workers: what each slot runs, how each lives, and how one stops to claim."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from uuid import UUID

from sqlalchemy.orm import Session

from pgqueue.dashboard.routing import Asked, Done, Page, Refused, Route
from pgqueue.rules.served_queues import serves
from pgqueue.views.queues import HeldJob, WorkerState

FRESH = 3.0
"""Seconds within which a worker beats several times."""
MOST_SLOTS = 200
"""Slots of a worker that are drawn."""


class Square(NamedTuple):
    """A slot as it is drawn."""

    status: str
    title: str
    job_id: int | None


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker, as the page shows it."""

    state: WorkerState
    slots: Sequence[Square]
    longest: HeldJob | None
    """The job that it has held longest, of those that the user may see."""
    queues: Sequence[str]
    """Those that it serves, of those that the user may see."""

    @property
    def lives(self) -> tuple[str, str]:
        """The status whose colour it has, and how it lives, in words."""
        if not self.state.is_live:
            return "failed", "silent"
        if self.state.heartbeat_age.total_seconds() > FRESH:
            return "retrying", "late"
        return ("cancelled", "quiet") if self.state.is_quiet else ("succeeded", "alive")

    @property
    def busy(self) -> int:
        return min(len(self.state.jobs), self.state.slots)


def read_workers(asked: Asked, session: Session) -> list[WorkerRow]:
    """The workers that serve, or run a job of, one of the queues that the user may see."""
    found = []
    for state in asked.queue.views.workers(session):
        jobs = [job for job in state.jobs if _may_see(asked, job)]
        queues = asked.access.queues
        if queues is None or jobs or any(serves(state.queues, name) for name in queues):
            squares = [_square(asked, job) for job in state.jobs[: state.slots]]
            squares += [Square("free", "free", None)] * (state.slots - len(squares))
            longest = jobs[0] if jobs else None
            found.append(WorkerRow(state, squares[:MOST_SLOTS], longest, _served(asked, state)))
    return found


def _served(asked: Asked, state: WorkerState) -> Sequence[str]:
    if not asked.access.is_limited:
        return state.queues
    return [name for name in sorted(asked.access.queues or ()) if serves(state.queues, name)]


def _may_see(asked: Asked, job: HeldJob) -> bool:
    queues = asked.access.queues
    return asked.access.tags is None and (queues is None or job.queue in queues)


def _square(asked: Asked, job: HeldJob) -> Square:
    if not _may_see(asked, job):
        return Square("running", "a job that you may not see", None)
    return Square("running", f"#{job.job_id} {job.task}, attempt {job.attempt}", job.job_id)


def workers(asked: Asked) -> Page:
    """The live workers, the first started first."""
    rows = asked.part("the workers", partial(read_workers, asked))
    return Page("workers.html", title="Workers", rows=rows, command="pgqueue workers")


def quiet_worker(asked: Asked) -> Done:
    """Let a worker claim no more jobs; it ends those that it has claimed."""
    asked.check_sees_all("a worker serves all users")
    try:
        worker_id = UUID(asked.posted("worker"))
    except ValueError:
        raise Refused("worker is no id of a worker") from None
    if not asked.operator.quiet(worker_id):
        raise Refused("this worker has ended; nothing was changed", 404)
    return Done("the worker claims no more jobs", to=asked.back())


ROUTES = [
    Route("/workers", workers),
    Route("/workers/quiet", quiet_worker, method="POST", right="workers"),
]
