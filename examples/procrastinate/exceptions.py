"""The errors that an application catches or raises."""


class ProcrastinateException(Exception):
    """Any error of this package."""


class AlreadyEnqueued(ProcrastinateException):
    """A job with the same queueing lock waits."""


class JobAborted(ProcrastinateException):
    """Raised by a task that has seen ``context.should_abort()``."""


class TaskAlreadyRegistered(ProcrastinateException):
    """Another task has the name."""


class TaskNotFound(ProcrastinateException):
    """The application has no task of this name."""


class UnboundTaskError(ProcrastinateException):
    """The task belongs to a blueprint that no application has added."""
