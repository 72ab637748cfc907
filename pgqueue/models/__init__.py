"""The tables, and the one thing that is not a column: where a job stands.

State is the place where a row stands.  A message is the permission to start an attempt, a
lease the right to finish it, and the job is the durable record.  Rows are described here and
nowhere else; what is done to them is in :mod:`pgqueue.statements`.
"""

from pgqueue.models.base import SCHEMA, Base
from pgqueue.models.dispatch import DeadLetter, JobAttempt, Lease, MessageQueue
from pgqueue.models.fleet import QueueSettings, SchemaVersion, WorkerProcess
from pgqueue.models.job import DEFAULT_MAX_ATTEMPTS, DEFAULT_PRIORITY, DEFAULT_QUEUE, Job
from pgqueue.models.status import JobStatus

__all__ = [
    "SCHEMA",
    "Base",
    "Job",
    "JobStatus",
    "MessageQueue",
    "Lease",
    "JobAttempt",
    "DeadLetter",
    "WorkerProcess",
    "QueueSettings",
    "SchemaVersion",
    "DEFAULT_QUEUE",
    "DEFAULT_PRIORITY",
    "DEFAULT_MAX_ATTEMPTS",
]
