"""The newest jobs as they move, to watch while an application is developed."""

from pgqueue.dashboard.routing import Page, Request, Route
from pgqueue.operations import Selection

NEWEST = 50


def live(request: Request) -> Page:
    """The newest jobs, whatever their status; the page refreshes itself."""
    every, views = request.scope(Selection()), request.queue.views
    page = request.part("the list", lambda session: views.jobs(session, every, limit=NEWEST))
    jobs = None if page is None else page.jobs
    return Page("live.html", title="Live", command=f"pgqueue jobs --limit {NEWEST}", jobs=jobs)


ROUTES = [Route("/live", live)]
