"""The pages, one module each: their routes together."""

from itertools import chain

from pgqueue.dashboard.pages import (
    actions,
    batches,
    failures,
    job,
    job_forms,
    jobs,
    live,
    log,
    overview,
    queues,
    schedules,
    tasks,
    workers,
    you,
)

PAGES = (
    *(overview, failures, actions, job, job_forms, jobs, live, queues, tasks, schedules, batches),
    *(workers, log, you),
)

ROUTES = tuple(chain.from_iterable(page.ROUTES for page in PAGES))
