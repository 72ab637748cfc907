"""The tables, and the computed attribute ``Job.status``.

The state of a job follows from the tables in which it has a row.  A message is the permission to
start an attempt, a lease the right to finish it, and the job is the durable record.  Tables are
declared only here; the statements on them are in :mod:`pgqueue.repository`.
"""

from pgqueue.models.base import SCHEMA, Base
from pgqueue.models.batch import Batch, BatchJob
from pgqueue.models.blocked import Blocked, Dependency
from pgqueue.models.dead_letter import DeadLetter
from pgqueue.models.declared_task import DeclaredTask
from pgqueue.models.deploy import Deploy
from pgqueue.models.error_group import ErrorGroup
from pgqueue.models.job import DEFAULT_MAX_ATTEMPTS, DEFAULT_PRIORITY, DEFAULT_QUEUE, Job
from pgqueue.models.job_attempt import JobAttempt
from pgqueue.models.job_step import JobStep, StepKind
from pgqueue.models.lease import Lease
from pgqueue.models.limit_bucket import LimitBucket
from pgqueue.models.limit_place import LimitPlace
from pgqueue.models.limit_settings import LimitSettings
from pgqueue.models.message_queue import MessageQueue
from pgqueue.models.operator_action import OperatorAction
from pgqueue.models.paused_task import PausedTask
from pgqueue.models.queue_minute import QueueMinute
from pgqueue.models.queue_settings import QueueSettings
from pgqueue.models.schedule import Schedule
from pgqueue.models.schema_version import SchemaVersion
from pgqueue.models.sent_signal import Signal
from pgqueue.models.states import DEAD, ENDED, STATES, UNFINISHED, WAITING, JobStatus, State
from pgqueue.models.task_minute import TaskMinute
from pgqueue.models.unreadable_job import UnreadableJob
from pgqueue.models.waiting_message import WaitingMessage
from pgqueue.models.worker_process import WorkerProcess

__all__ = [
    "SCHEMA",
    "Base",
    "Job",
    "JobStatus",
    "MessageQueue",
    "Lease",
    "JobAttempt",
    "JobStep",
    "StepKind",
    "DeadLetter",
    "UnreadableJob",
    "WorkerProcess",
    "QueueSettings",
    "PausedTask",
    "Schedule",
    "WaitingMessage",
    "LimitBucket",
    "LimitPlace",
    "LimitSettings",
    "Batch",
    "BatchJob",
    "Blocked",
    "Dependency",
    "Signal",
    "TaskMinute",
    "ErrorGroup",
    "QueueMinute",
    "DeclaredTask",
    "Deploy",
    "OperatorAction",
    "SchemaVersion",
    "State",
    "STATES",
    "WAITING",
    "UNFINISHED",
    "DEAD",
    "ENDED",
    "DEFAULT_QUEUE",
    "DEFAULT_PRIORITY",
    "DEFAULT_MAX_ATTEMPTS",
]
