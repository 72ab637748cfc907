"""Every exception a caller may catch.  All derive from :class:`PgQueueError`."""


class PgQueueError(Exception):
    """Something pgqueue refuses to do, said so that the reader knows what to do next."""


class TaskDefinitionError(PgQueueError, TypeError):
    """A function cannot be made a task as it is written."""


class UnknownTask(PgQueueError, LookupError):
    """No task of that name is registered in this process."""


class ArgumentsError(PgQueueError, TypeError):
    """The arguments of a job do not fit the signature of its task."""


class PayloadError(PgQueueError, ValueError):
    """An argument has the right type but a value that JSON or PostgreSQL cannot keep."""


class OptionError(PgQueueError, ValueError):
    """An option of a task, a job or a worker is out of its range."""


class UnknownOption(PgQueueError, TypeError):
    """No option of that name exists."""


class DuplicateJob(PgQueueError):
    """Another unfinished job of this queue holds the unique key."""

    holder: int | None = None
    """The id of that job, where it can still be asked for: a flush that failed cannot ask."""


class JobNotFound(PgQueueError, LookupError):
    """No job has that id: it was never enqueued, was rolled back, or has been deleted."""


class NotBound(PgQueueError, RuntimeError):
    """The queue or the session has no engine by which to reach the database."""


class NoTransaction(PgQueueError, RuntimeError):
    """Statements that belong together were asked for where each would commit alone."""


class UsedAcrossFork(PgQueueError, RuntimeError):
    """An object with open connections was carried into a forked process."""


class SchemaError(PgQueueError, RuntimeError):
    """The tables in the database are not the ones this version of pgqueue works with."""


class SchemaMissing(SchemaError):
    """The database has no pgqueue tables."""


class SchemaTooOld(SchemaError):
    """The tables are older than this version of pgqueue."""


class SchemaTooNew(SchemaError):
    """The tables have been upgraded past what this version of pgqueue can serve."""


class WorkerBroken(PgQueueError, RuntimeError):
    """A thread of the worker has ended by a mistake in pgqueue; start the worker again."""


class TooManyStuck(PgQueueError, RuntimeError):
    """As many handlers are stuck past their timeout as the worker has slots: end the process."""
