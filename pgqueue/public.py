"""The public names, which ``pgqueue`` hands on."""

from pgqueue.batches import OpenBatch
from pgqueue.claims import ClaimedJob
from pgqueue.context import JobContext
from pgqueue.errors import (
    ArgumentsError,
    AttemptFailed,
    BadToken,
    BatchEnded,
    BatchNotFound,
    DelayInEventLoop,
    DelayInTransaction,
    DuplicateJob,
    DuplicateSchedule,
    JobNotFound,
    JobsFailed,
    LeaseLost,
    NotBound,
    NoTransaction,
    OptionError,
    PayloadError,
    PgQueueError,
    RowsHidden,
    ScheduleNotFound,
    SchemaError,
    SchemaMissing,
    SchemaTooNew,
    SchemaTooOld,
    SignalTimeout,
    TaskDefinitionError,
    TooManyStuck,
    UnknownOption,
    UnknownTask,
    UsedAcrossFork,
    WaitTimeout,
    WorkerBroken,
)
from pgqueue.events import AttemptEnded, AttemptOutcome
from pgqueue.job_queue import PgQueue
from pgqueue.models import DeadLetter, Job, JobAttempt, JobStatus, Lease, MessageQueue
from pgqueue.nodes import Node
from pgqueue.operations import ActionRun, AsyncOperator, Operator, Result, Selection
from pgqueue.outcomes import AttemptEnd, Cancel, Discard, ErrorReport, Snooze, Suspended
from pgqueue.redaction import Secret
from pgqueue.repository.batches import BatchState
from pgqueue.repository.invariants import Violation
from pgqueue.repository.job_state import JobState
from pgqueue.repository.jobs import Change
from pgqueue.repository.limits import LimitState
from pgqueue.repository.schedules import ScheduleState
from pgqueue.repository.workers import HeldJob, WorkerState
from pgqueue.rules.limits import Limit
from pgqueue.rules.retention import Keep
from pgqueue.rules.retry import Retry
from pgqueue.rules.unique import Unique
from pgqueue.schedules import Schedules
from pgqueue.tasks import Task
from pgqueue.worker import Worker, WorkerHealth
from pgqueue.workflows import Group, OpenWorkflow

__all__ = [
    # queue, tasks and workers
    "PgQueue",
    "Task",
    "Unique",
    "Worker",
    "Keep",
    "Node",
    "WorkerHealth",
    # for handlers
    "JobContext",
    "Secret",
    "Retry",
    "Limit",
    "Cancel",
    "Discard",
    "Snooze",
    "Suspended",
    # events
    "AttemptEnded",
    "AttemptEnd",
    "AttemptOutcome",
    "ErrorReport",
    # tables
    "Job",
    "JobStatus",
    "MessageQueue",
    "Lease",
    "JobAttempt",
    "DeadLetter",
    # what operators do
    "Selection",
    "Operator",
    "AsyncOperator",
    "ActionRun",
    "Result",
    # results of operators' calls
    "Change",
    "HeldJob",
    "JobState",
    "LimitState",
    "Violation",
    "WorkerState",
    # claims
    "ClaimedJob",
    # batches
    "BatchState",
    "OpenBatch",
    "OpenWorkflow",
    "Group",
    # schedules
    "Schedules",
    "ScheduleState",
    # errors
    "PgQueueError",
    "ArgumentsError",
    "AttemptFailed",
    "BadToken",
    "BatchEnded",
    "BatchNotFound",
    "DelayInEventLoop",
    "DelayInTransaction",
    "DuplicateJob",
    "DuplicateSchedule",
    "JobNotFound",
    "LeaseLost",
    "SignalTimeout",
    "JobsFailed",
    "NotBound",
    "NoTransaction",
    "OptionError",
    "PayloadError",
    "RowsHidden",
    "ScheduleNotFound",
    "SchemaError",
    "SchemaMissing",
    "SchemaTooNew",
    "SchemaTooOld",
    "TaskDefinitionError",
    "TooManyStuck",
    "UnknownOption",
    "UnknownTask",
    "UsedAcrossFork",
    "WaitTimeout",
    "WorkerBroken",
]
