"""The pages, one module each: their routes together."""

from itertools import chain

from pgqueue.dashboard.pages import you

PAGES = (you,)

ROUTES = tuple(chain.from_iterable(page.ROUTES for page in PAGES))
