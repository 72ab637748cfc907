"""The pages, one module each: their routes together."""

from itertools import chain

from pgqueue.dashboard.pages import overview, queues, tasks, workers, you

PAGES = (overview, queues, tasks, workers, you)

ROUTES = tuple(chain.from_iterable(page.ROUTES for page in PAGES))
