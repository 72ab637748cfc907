"""Pages of jobs, and one job: what the commands and the dashboard name of them."""

from datetime import datetime

from pgqueue.models import JobStatus
from pgqueue.repository.job_line import JobLine
from pgqueue.repository.listing import (
    MOST_NODES,
    MOST_STEPS,
    NOT_YOURS,
    JobDetails,
    LimitUse,
    PastAttempt,
    StepOfJob,
)
from pgqueue.repository.pages import JobPage, PageStart, page_start, text_of_start

__all__ = [
    "MOST_NODES",
    "MOST_STEPS",
    "NOT_YOURS",
    "JobDetails",
    "JobLine",
    "JobPage",
    "LimitUse",
    "PageStart",
    "PastAttempt",
    "StepOfJob",
    "page_start",
    "state_in_words",
    "text_of_start",
]


def state_in_words(status: JobStatus, *, attempts: int, run_at: datetime, now: datetime) -> str:
    """The word for the state of a job, as a filter line has it: of a pending job, what it waits
    for."""
    if status is not JobStatus.PENDING:
        return status.value
    if attempts:
        return "retrying"
    return "scheduled" if run_at > now else "due"
