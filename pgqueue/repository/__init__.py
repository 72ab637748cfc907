"""Runs statements on a given Session or Connection.  Never commits, never opens one."""

from pgqueue.repository.attempts import Attempts, Claim, Claimed, Locked, Pair, Settled
from pgqueue.repository.fleet import Fleet, Member
from pgqueue.repository.health import Health, OldTransaction, Waiting
from pgqueue.repository.jobs import (
    Change,
    Enqueued,
    Holding,
    Jobs,
    NewJob,
    StatusCount,
    Violation,
    raising_duplicate,
)
from pgqueue.repository.listing import Holder, JobDetails, JobLine, JobPage, Listing, PastAttempt

__all__ = [
    "Attempts",
    "Change",
    "Claim",
    "Claimed",
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
    "Pair",
    "OldTransaction",
    "PastAttempt",
    "Settled",
    "StatusCount",
    "Violation",
    "Waiting",
    "raising_duplicate",
]
