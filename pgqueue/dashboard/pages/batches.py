"""The batches: how far each one is, and which of its jobs have failed."""

import json
from typing import Any

from sqlalchemy.orm import Session

from pgqueue import BatchState
from pgqueue.dashboard.routing import Page, Refused, Request, Route
from pgqueue.models import UNFINISHED, JobStatus
from pgqueue.operations import Selection
from pgqueue.redaction import redacted_data
from pgqueue.views.graph import BY_URGENCY, Box, Graph

NEWEST = 50
FAILED = 25

WIDTH, HEIGHT, GAP_ACROSS, GAP_DOWN = 208, 44, 56, 16
"""The size of a box in the graph of a workflow, and the room between boxes, in pixels."""


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
    first = None
    if found is not None and found.failed:
        first = request.part(
            "the first failure",
            lambda session: request.queue.views.first_failure(session, batch_id),
        )
    graph = request.part("the graph", lambda session: request.queue.views.graph(session, batch_id))
    meta = "" if found is None else json.dumps(redacted_data(dict(found.meta)))
    name = f" {found.name}" if found is not None and found.name else ""
    return Page(
        "batch.html",
        title=f"{'Batch' if graph is None else 'Workflow'} {batch_id}{name}",
        command=f"pgqueue jobs --batch {batch_id}",
        batch_id=batch_id,
        batch=found,
        meta="" if meta == "{}" else meta,
        page=page,
        first=first,
        graph=None if graph is None or len(graph.boxes) < 2 else _drawn(request, batch_id, graph),
        line=f"batch:{batch_id}",
        unfinished=Selection(status=UNFINISHED, batch=batch_id).line,
    )


def _drawn(request: Request, batch_id: int, graph: Graph) -> dict[str, Any]:
    """The boxes and lines of a graph, in pixels."""
    corners = [(WIDTH + GAP_ACROSS) * box.column for box in graph.boxes]
    tops = [int((HEIGHT + GAP_DOWN) * box.row) for box in graph.boxes]
    boxes = [
        {
            "x": x,
            "y": y,
            "box": box,
            "href": _address(request, batch_id, box),
            "states": ", ".join(
                f"{box.counts[status]} {status.value}"
                for status in BY_URGENCY
                if box.counts[status]
            ),
        }
        for x, y, box in zip(corners, tops, graph.boxes, strict=True)
    ]
    lines = [
        (
            corners[before] + WIDTH,
            tops[before] + HEIGHT // 2,
            corners[number],
            tops[number] + HEIGHT // 2,
        )
        for number, box in enumerate(graph.boxes)
        for before in sorted(box.after)
    ]
    return {
        "boxes": boxes,
        "lines": lines,
        "width": max(corners) + WIDTH,
        "height": max(tops) + HEIGHT,
        "box_size": (WIDTH, HEIGHT),
        "is_by_task": graph.is_by_task,
    }


def _address(request: Request, batch_id: int, box: Box) -> str:
    if box.total == 1:
        return request.url("job", job_id=box.first_id)
    return request.url("jobs", q=Selection(task=box.task, batch=batch_id).line)


ROUTES = [Route("/batches", batches), Route("/batches/<int:batch_id>", batch)]
