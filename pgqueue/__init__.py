"""Background jobs for SQLAlchemy applications, committed together with your rows.

docs/explanation/architecture.md describes the packages and the order of their imports.
"""

from pgqueue.context import JobContext
from pgqueue.errors import (
    ArgumentsError,
    AttemptFailed,
    DelayInTransaction,
    DuplicateJob,
    JobNotFound,
    LeaseLost,
    NotBound,
    NoTransaction,
    OptionError,
    PayloadError,
    PgQueueError,
    SchemaError,
    SchemaMissing,
    SchemaTooNew,
    SchemaTooOld,
    TaskDefinitionError,
    TooManyStuck,
    UnknownOption,
    UnknownTask,
    UsedAcrossFork,
    WorkerBroken,
)
from pgqueue.events import AttemptEnded, AttemptOutcome
from pgqueue.job_queue import PgQueue
from pgqueue.models import (
    DeadLetter,
    Job,
    JobAttempt,
    JobStatus,
    Lease,
    MessageQueue,
    QueueSettings,
    UnreadableJob,
    WorkerProcess,
)
from pgqueue.outcomes import AttemptEnd, Cancel, Discard, ErrorReport, Snooze
from pgqueue.redaction import Secret
from pgqueue.repository import Change, Violation
from pgqueue.retention import Keep
from pgqueue.retry import Retry
from pgqueue.tasks import Task
from pgqueue.worker import Worker, WorkerHealth

__all__ = [
    # queue, tasks and workers
    "PgQueue",
    "Task",
    "Worker",
    "Keep",
    "WorkerHealth",
    # for handlers
    "JobContext",
    "Secret",
    "Retry",
    "Cancel",
    "Discard",
    "Snooze",
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
    "UnreadableJob",
    "WorkerProcess",
    "QueueSettings",
    # results of operators' calls
    "Change",
    "Violation",
    # errors
    "PgQueueError",
    "ArgumentsError",
    "AttemptFailed",
    "DelayInTransaction",
    "DuplicateJob",
    "JobNotFound",
    "LeaseLost",
    "NotBound",
    "NoTransaction",
    "OptionError",
    "PayloadError",
    "SchemaError",
    "SchemaMissing",
    "SchemaTooNew",
    "SchemaTooOld",
    "TaskDefinitionError",
    "TooManyStuck",
    "UnknownOption",
    "UnknownTask",
    "UsedAcrossFork",
    "WorkerBroken",
]
