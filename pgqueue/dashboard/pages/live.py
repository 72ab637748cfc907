"""The newest jobs as they move, to watch while an application is developed."""

from pgqueue.dashboard.routing import Asked, Page, Route
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.pages import Pages

NEWEST = 50


def live(asked: Asked) -> Page:
    """The newest jobs, whatever their status; the page refreshes itself."""
    which = asked.scope(JobFilter())
    page = asked.part("the list", lambda session: Pages(session).page(which, limit=NEWEST))
    jobs = None if page is None else page.jobs
    return Page("live.html", title="Live", command=f"pgqueue jobs --limit {NEWEST}", jobs=jobs)


ROUTES = [Route("/live", live)]
