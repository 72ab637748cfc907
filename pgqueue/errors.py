"""Every exception that a caller may catch.  All derive from :class:`PgQueueError`."""

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

FIRST, LAST = 1500, 500
"""Characters of a message that are kept of its beginning and its end, if it is longer."""


class PgQueueError(Exception):
    """Base class of the errors that pgqueue raises.  The message says what to do next.

    A message may quote what somebody has given, of any length: its middle is left out.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*map(_shortened, arguments))


def _shortened(message: object) -> object:
    if not isinstance(message, str) or len(message) <= FIRST + LAST:
        return message
    left_out = len(message) - FIRST - LAST
    return f"{message[:FIRST]} [... {left_out:,} characters ...] {message[-LAST:]}"


class TaskDefinitionError(PgQueueError, TypeError):
    """A function cannot be made a task in its present form."""


class UnknownTask(PgQueueError, LookupError):
    """No task with this name is registered in this process, or no worker has declared one."""


class ArgumentsError(PgQueueError, TypeError):
    """The arguments of a job do not fit the signature of its task."""


class PayloadError(PgQueueError, ValueError):
    """An argument, or a result that its task requires, has a value that JSON or PostgreSQL cannot
    store."""


class OptionError(PgQueueError, ValueError):
    """An option of a task, a job or a worker is out of its range."""


class UnknownOption(PgQueueError, TypeError):
    """No option with this name exists."""


class DuplicateJob(PgQueueError):
    """Another job holds the unique key: one of the same queue, or of any queue if the
    key is one across queues."""

    holder: int | None = None
    """The id of the job that holds the key.  None after a failed flush, which cannot look it up,
    and for two rows of one ``enqueue_many``."""


class DuplicateSchedule(PgQueueError):
    """A schedule with this name already exists."""


class ScheduleNotFound(PgQueueError, LookupError):
    """No schedule has this name."""


class BatchNotFound(PgQueueError, LookupError):
    """No batch has this id: it was never created, was rolled back, or has been deleted."""


class BatchEnded(PgQueueError):
    """The batch has ended, so no job can be added to it; nothing was enqueued."""


class LeaseLost(PgQueueError, RuntimeError):
    """The attempt has lost its lease, so its writes and its result are not kept."""


class SignalTimeout(PgQueueError, TimeoutError):
    """The signal has not come in time for which a handler waits."""


class WaitTimeout(PgQueueError, TimeoutError):
    """The job has not ended within the time for which a caller has waited.  The job goes on."""

    def __init__(self, message: str, state: Any) -> None:
        super().__init__(message)
        self.state = state
        """The :class:`JobState` at the end of the wait."""


class JobsFailed(PgQueueError):
    """Some of the jobs for whose end a handler has waited have not succeeded."""

    def __init__(self, message: str, jobs: Sequence[Any]) -> None:
        super().__init__(message)
        self.jobs = jobs
        """All of them, in the order in which they were enqueued."""


class JobNotFound(PgQueueError, LookupError):
    """No job of this database has this id: it was never enqueued, was rolled back, has been
    deleted, or is on another node."""


class BadToken(PgQueueError, ValueError):
    """A token of a job was not made with this application's secret, or is too old."""


class NotBound(PgQueueError, RuntimeError):
    """The queue or the session has no engine to connect to the database."""


class NoTransaction(PgQueueError, RuntimeError):
    """Statements that need one transaction were called on a connection in AUTOCOMMIT."""


class UsedAcrossFork(PgQueueError, RuntimeError):
    """An object with open connections was used in a forked process."""


class SchemaError(PgQueueError, RuntimeError):
    """The tables in the database do not fit this version of pgqueue."""


class SchemaMissing(SchemaError):
    """The database has no pgqueue tables."""


class SchemaTooOld(SchemaError):
    """The tables are older than this version of pgqueue."""


class SchemaTooNew(SchemaError):
    """The tables are newer than this version of pgqueue supports."""


class RowsHidden(SchemaError):
    """Row security hides rows of the pgqueue tables from the role; nothing was changed."""


class WorkerBroken(PgQueueError, RuntimeError):
    """A thread of the worker has ended because of a bug in pgqueue.  Restart the worker."""


class TooManyStuck(PgQueueError, RuntimeError):
    """Handlers that are past their timeouts occupy all slots of the worker.  End the process."""


class AttemptFailed(PgQueueError):
    """With ``raise_errors``, an attempt failed and has no exception that could be raised.

    For example, it timed out, its arguments cannot be decoded, or its child process died.
    """


class DelayInTransaction(UserWarning):
    """``delay()`` was called while a session of the caller had a transaction open.

    This is a warning, not an error.  To silence it, call
    ``warnings.filterwarnings("ignore", category=DelayInTransaction)``.
    """


class PgQueueDeprecationWarning(DeprecationWarning):
    """The application uses something that a later minor version of pgqueue removes.

    The message names the replacement and this version.  To make it an error, call
    ``warnings.filterwarnings("error", category=PgQueueDeprecationWarning)``.
    """


def warn_deprecated(old: str, *, use: str, removed_in: str) -> None:
    """Warn of a deprecated name, at the line of the application that uses it."""
    package = os.path.dirname(__file__) + os.sep
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"{old} is deprecated, and pgqueue {removed_in} removes it: use {use}",
        PgQueueDeprecationWarning,
        stacklevel=level,
    )


class DelayInEventLoop(UserWarning):
    """``delay()`` was called in an event loop, and has blocked it; ``delay_async()`` does not.

    This is a warning, not an error.  To silence it, call
    ``warnings.filterwarnings("ignore", category=DelayInEventLoop)``.
    """
