"""The pages, one module each: their routes together."""

from itertools import chain

from pgqueue.dashboard.pages import job, job_forms, live, overview, queues, tasks, workers, you

PAGES = (overview, job, job_forms, live, queues, tasks, workers, you)

ROUTES = tuple(chain.from_iterable(page.ROUTES for page in PAGES))
