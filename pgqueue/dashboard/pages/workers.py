"""The workers: what each slot runs, its last heartbeat, and how to make it quiet and undo it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from uuid import UUID

from sqlalchemy.orm import Session

from pgqueue.dashboard.routing import Done, Page, Refused, Request, Route
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


def read_workers(request: Request, session: Session) -> list[WorkerRow]:
    """The workers that serve, or run a job of, one of the queues that the user may see."""
    found = []
    for state in request.queue.views.workers(session):
        jobs = [job for job in state.jobs if _may_see(request, job)]
        queues = request.access.queues
        if queues is None or jobs or any(serves(state.queues, name) for name in queues):
            squares = [_square(request, job) for job in state.jobs[: state.slots]]
            squares += [Square("free", "free", None)] * (state.slots - len(squares))
            longest = jobs[0] if jobs else None
            found.append(WorkerRow(state, squares[:MOST_SLOTS], longest, _served(request, state)))
    return found


def _served(request: Request, state: WorkerState) -> Sequence[str]:
    if not request.access.is_limited:
        return state.queues
    return [name for name in sorted(request.access.queues or ()) if serves(state.queues, name)]


def _may_see(request: Request, job: HeldJob) -> bool:
    queues = request.access.queues
    return request.access.tags is None and (queues is None or job.queue in queues)


def _square(request: Request, job: HeldJob) -> Square:
    if not _may_see(request, job):
        return Square("running", "a job that you may not see", None)
    return Square("running", f"#{job.job_id} {job.task}, attempt {job.attempt}", job.job_id)


def workers(request: Request) -> Page:
    """The live workers, the first started first."""
    rows = request.part("the workers", partial(read_workers, request))
    return Page("workers.html", title="Workers", rows=rows, command="pgqueue workers")


def quiet_worker(request: Request) -> Done:
    """Let a worker claim no more jobs; it ends those that it has claimed."""
    _refuse_ended(request.operator.quiet(_worker(request)))
    return Done("the worker claims no more jobs", to=request.back())


def unquiet_worker(request: Request) -> Done:
    """Let a quiet worker claim jobs again."""
    _refuse_ended(request.operator.unquiet(_worker(request)))
    return Done("the worker claims jobs again", to=request.back())


def _worker(request: Request) -> UUID:
    request.check_sees_all("a worker serves all users")
    try:
        return UUID(request.posted("worker"))
    except ValueError:
        raise Refused("worker is no id of a worker") from None


def _refuse_ended(is_live: bool) -> None:
    if not is_live:
        raise Refused("this worker has ended; nothing was changed", 404)


ROUTES = [
    Route("/workers", workers),
    Route("/workers/quiet", quiet_worker, method="POST", right="workers"),
    Route("/workers/unquiet", unquiet_worker, method="POST", right="workers"),
]
