"""The batches: how far each one is, and which of its jobs have failed."""

import json

from sqlalchemy.orm import Session

from pgqueue import BatchState
from pgqueue.dashboard.routing import Page, Refused, Request, Route
from pgqueue.models import UNFINISHED, JobStatus
from pgqueue.operations import Selection
from pgqueue.redaction import redacted_data

NEWEST = 50
FAILED = 25


def batches(request: Request) -> Page:
    """The newest batches, as a worker has counted them last."""
    found, views = None, request.queue.views
    if not request.access.is_limited:
        found = request.part("the batches", lambda session: views.batches(session, limit=NEWEST))
    return Page(
        "batches.html", title="Batches", command=f"pgqueue batches --limit {NEWEST}", batches=found
    )


def batch(request: Request, batch_id: int) -> Page:
    """One batch: its progress, its failed jobs, and the job that its end has enqueued."""
    if request.access.is_limited:
        raise Refused(f"there is no batch {batch_id}, or you may not see all of its jobs", 404)
    failed = Selection(status=JobStatus.FAILED, batch=batch_id)

    def counted(session: Session) -> BatchState:
        return request.queue.progress_of(session, batch_id)

    found = request.part("the progress", counted)
    page = request.part(
        "the failed jobs",
        lambda session: request.queue.views.jobs(session, failed, limit=FAILED),
    )
    meta = "" if found is None else json.dumps(redacted_data(dict(found.meta)))
    name = f" {found.name}" if found is not None and found.name else ""
    return Page(
        "batch.html",
        title=f"Batch {batch_id}{name}",
        command=f"pgqueue jobs --batch {batch_id}",
        batch_id=batch_id,
        batch=found,
        meta="" if meta == "{}" else meta,
        page=page,
        line=f"batch:{batch_id}",
        unfinished=Selection(status=UNFINISHED, batch=batch_id).line,
    )


ROUTES = [Route("/batches", batches), Route("/batches/<int:batch_id>", batch)]
