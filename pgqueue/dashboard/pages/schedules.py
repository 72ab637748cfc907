"""The schedules: when each one runs next, and how its last jobs have ended."""

from pgqueue.dashboard.routing import Asked, Done, Page, Route
from pgqueue.views.schedules import RECENT


def schedules(asked: Asked) -> Page:
    rows = None
    if not asked.access.is_limited:
        rows = asked.part("the schedules", asked.queue.views.schedules)
    return Page(
        "schedules.html", title="Schedules", command="pgqueue schedules", rows=rows, recent=RECENT
    )


def run_schedule(asked: Asked) -> Done:
    """Enqueue a job of a schedule now; its next tick stays where it is."""
    name = _name(asked)
    job_id = asked.operator.trigger_schedule(name)
    return Done(f"enqueued job {job_id} of schedule {name}", to=asked.back())


def pause_schedule(asked: Asked) -> Done:
    name = _name(asked)
    asked.operator.pause_schedule(name)
    return Done(f"paused schedule {name}", to=asked.back())


def resume_schedule(asked: Asked) -> Done:
    name = _name(asked)
    asked.operator.resume_schedule(name)
    return Done(f"resumed schedule {name}", to=asked.back())


def _name(asked: Asked) -> str:
    asked.check_sees_all("a schedule may have jobs of any queue")
    return asked.posted("schedule")


ROUTES = [
    Route("/schedules", schedules),
    Route("/schedules/run", run_schedule, method="POST", right="schedules"),
    Route("/schedules/pause", pause_schedule, method="POST", right="schedules"),
    Route("/schedules/resume", resume_schedule, method="POST", right="schedules"),
]
