"""Background jobs for SQLAlchemy applications, which commit with your rows.

    doors          flask · cli · demo · terminal · embedded
    loops          worker · maintenance
    verbs          execution · job_queue · tasks · notifications · schema
    transactions   unit_of_work · async_session · joining
    repository     runs statements on a given Session; never commits
    thought        statements · retry · payload · reports · options · arguments
    words          models · outcomes · context · errors

Imports run downwards only.
"""

from pgqueue.context import JobContext
from pgqueue.errors import (
    ArgumentsError,
    DuplicateJob,
    JobNotFound,
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
from pgqueue.job_queue import PgQueue
from pgqueue.models import (
    DeadLetter,
    Job,
    JobAttempt,
    JobStatus,
    Lease,
    MessageQueue,
    QueueSettings,
    WorkerProcess,
)
from pgqueue.outcomes import Cancel, Discard, Snooze
from pgqueue.redaction import Secret
from pgqueue.repository import Change, Violation
from pgqueue.retry import Retry
from pgqueue.tasks import Task
from pgqueue.worker import Worker

__all__ = [
    # what an application holds
    "PgQueue",
    "Task",
    "Worker",
    # what a handler is given, and may say
    "JobContext",
    "Secret",
    "Retry",
    "Cancel",
    "Discard",
    "Snooze",
    # the tables
    "Job",
    "JobStatus",
    "MessageQueue",
    "Lease",
    "JobAttempt",
    "DeadLetter",
    "WorkerProcess",
    "QueueSettings",
    # what operators are told
    "Change",
    "Violation",
    # what may be caught
    "PgQueueError",
    "ArgumentsError",
    "DuplicateJob",
    "JobNotFound",
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
