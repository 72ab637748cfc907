"""Runs statements on a given Session or Connection; never commits and never opens one."""

from pgqueue.repository.attempts import Attempts
from pgqueue.repository.due_times import DueTimes
from pgqueue.repository.health import (
    LIMITS,
    Creator,
    Health,
    OldTransaction,
    Slot,
    TableHealth,
    Unreadable,
    Waiting,
)
from pgqueue.repository.jobs import Change, Enqueued, Jobs, KeyHolder, NewJob, raising_duplicate
from pgqueue.repository.listing import Holder, JobDetails, JobLine, JobPage, Listing, PastAttempt
from pgqueue.repository.pruning import DueJobs, Pruning, Stretch
from pgqueue.repository.rows import (
    Claim,
    ClaimCursor,
    Claimed,
    Locked,
    Rescued,
    Settled,
    StatusCount,
    Upcoming,
    Violation,
)
from pgqueue.repository.workers import Notices, SeenWorker, Workers

__all__ = [
    "LIMITS",
    "Attempts",
    "Change",
    "Claim",
    "Claimed",
    "Creator",
    "DueJobs",
    "DueTimes",
    "Enqueued",
    "Workers",
    "Health",
    "Holder",
    "KeyHolder",
    "JobDetails",
    "JobLine",
    "JobPage",
    "Jobs",
    "Listing",
    "Locked",
    "SeenWorker",
    "NewJob",
    "Notices",
    "ClaimCursor",
    "OldTransaction",
    "PastAttempt",
    "Rescued",
    "Pruning",
    "Settled",
    "Slot",
    "TableHealth",
    "StatusCount",
    "Unreadable",
    "Stretch",
    "Upcoming",
    "Violation",
    "Waiting",
    "raising_duplicate",
]
