"""Pages of jobs, and one job: what the commands and the dashboard name of them."""

from pgqueue.repository.listing import (
    NOT_YOURS,
    JobDetails,
    LimitUse,
    PastAttempt,
)
from pgqueue.repository.pages import JobLine, JobPage, PageStart, page_start, words_of

__all__ = [
    "NOT_YOURS",
    "JobDetails",
    "JobLine",
    "JobPage",
    "LimitUse",
    "PageStart",
    "PastAttempt",
    "page_start",
    "words_of",
]
