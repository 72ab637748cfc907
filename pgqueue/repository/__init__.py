"""Runs statements on a given Session or Connection.  Never commits, never opens one."""

from pgqueue.repository.attempts import Attempts
from pgqueue.repository.fleet import Fleet, Member, Notices
from pgqueue.repository.health import (
    LIMITS,
    Creator,
    Health,
    OldTransaction,
    Slot,
    TableHealth,
    Waiting,
)
from pgqueue.repository.jobs import (
    Change,
    Enqueued,
    Holding,
    Jobs,
    NewJob,
    raising_duplicate,
)
from pgqueue.repository.listing import Holder, JobDetails, JobLine, JobPage, Listing, PastAttempt
from pgqueue.repository.rows import (
    Claim,
    Claimed,
    Locked,
    Pair,
    Settled,
    StatusCount,
    Upcoming,
    Violation,
)

__all__ = [
    "LIMITS",
    "Attempts",
    "Change",
    "Claim",
    "Claimed",
    "Creator",
    "Enqueued",
    "Fleet",
    "Health",
    "Holder",
    "Holding",
    "JobDetails",
    "JobLine",
    "JobPage",
    "Jobs",
    "Listing",
    "Locked",
    "Member",
    "NewJob",
    "Notices",
    "Pair",
    "OldTransaction",
    "PastAttempt",
    "Settled",
    "Slot",
    "TableHealth",
    "StatusCount",
    "Upcoming",
    "Violation",
    "Waiting",
    "raising_duplicate",
]
