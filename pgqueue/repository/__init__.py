"""Runs statements on a given Session or Connection; never commits and never opens one."""

from pgqueue.repository.admissions import Admissions, LimitState
from pgqueue.repository.attempts import Attempts
from pgqueue.repository.batches import Batches, BatchState, Callback, Candidate
from pgqueue.repository.due_times import DueTimes
from pgqueue.repository.enqueues import Enqueued, Enqueues, KeyHolder, NewJob, Placed
from pgqueue.repository.health import (
    LIMITS,
    Health,
    OldTransaction,
    TableHealth,
    Unreadable,
    Waiting,
)
from pgqueue.repository.jobs import Change, Jobs, JobValues, NewValues, raising_duplicate
from pgqueue.repository.listing import (
    Holder,
    JobDetails,
    JobLine,
    LimitUse,
    Listing,
    PastAttempt,
)
from pgqueue.repository.pruning import Pruning, Stretch
from pgqueue.repository.rows import (
    NOTHING,
    Ages,
    Claim,
    ClaimCursor,
    Claimed,
    Rescued,
    Settled,
    StatusCount,
    Upcoming,
    Violation,
)
from pgqueue.repository.schedules import DueSchedule, Moved, ScheduleRows, ScheduleState
from pgqueue.repository.workers import (
    NOTHING_PAUSED,
    Beat,
    Notices,
    Paused,
    SeenWorker,
    Workers,
)

__all__ = [
    "Ages",
    "NOTHING",
    "LIMITS",
    "Admissions",
    "Attempts",
    "NOTHING_PAUSED",
    "Paused",
    "BatchState",
    "Batches",
    "Beat",
    "Callback",
    "Candidate",
    "Change",
    "Claim",
    "Claimed",
    "DueSchedule",
    "DueTimes",
    "Enqueued",
    "Enqueues",
    "Workers",
    "Health",
    "Holder",
    "KeyHolder",
    "JobDetails",
    "JobLine",
    "Jobs",
    "JobValues",
    "NewValues",
    "LimitState",
    "LimitUse",
    "Listing",
    "Moved",
    "SeenWorker",
    "NewJob",
    "Notices",
    "ClaimCursor",
    "OldTransaction",
    "PastAttempt",
    "Placed",
    "Rescued",
    "Pruning",
    "ScheduleRows",
    "ScheduleState",
    "Settled",
    "TableHealth",
    "StatusCount",
    "Unreadable",
    "Stretch",
    "Upcoming",
    "Violation",
    "Waiting",
    "raising_duplicate",
]
