"""The schedules: when each one runs next, and how its last jobs have ended."""

from pgqueue.dashboard.routing import Done, Page, Request, Route
from pgqueue.views.schedules import RECENT


def schedules(request: Request) -> Page:
    rows = None
    if not request.access.is_limited:
        rows = request.part("the schedules", request.queue.views.schedules)
    return Page(
        "schedules.html", title="Schedules", command="pgqueue schedules", rows=rows, recent=RECENT
    )


def run_schedule(request: Request) -> Done:
    """Enqueue a job of a schedule now; its next tick stays where it is."""
    name = _name(request)
    job_id = request.operator.trigger_schedule(name)
    return Done(f"enqueued job {job_id} of schedule {name}", to=request.back())


def pause_schedule(request: Request) -> Done:
    name = _name(request)
    request.operator.pause_schedule(name)
    return Done(f"paused schedule {name}", to=request.back())


def resume_schedule(request: Request) -> Done:
    name = _name(request)
    request.operator.resume_schedule(name)
    return Done(f"resumed schedule {name}", to=request.back())


def _name(request: Request) -> str:
    request.check_sees_all("a schedule may have jobs of any queue")
    return request.posted("schedule")


ROUTES = [
    Route("/schedules", schedules),
    Route("/schedules/run", run_schedule, method="POST", right="schedules"),
    Route("/schedules/pause", pause_schedule, method="POST", right="schedules"),
    Route("/schedules/resume", resume_schedule, method="POST", right="schedules"),
]
