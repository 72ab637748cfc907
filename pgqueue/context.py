"""What a handler can ask for about its job."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class JobContext:
    """The running job, passed to a handler that has this type among its first parameters."""

    job_id: int
    """0 when the task is called as a plain function."""
    attempt: int
    """1 for the first attempt; unchanged after a Snooze."""
    max_attempts: int
    queue: str
    task: str
    session: Any = None
    """The Session or AsyncSession of a transactional handler, else None.  Writes through it commit
    together with the job's completion, or not at all."""
    cancelled: Callable[[], bool] = field(default=_never, repr=False)
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What was noted with ``task.options(meta=...)`` or by ``queue.on_enqueue``."""
    stopping: Callable[[], bool] = field(default=_never, repr=False)

    def is_cancelled(self) -> bool:
        """Whether the handler should stop: its job was cancelled, its attempt has timed out or was
        lost, or its transaction has ended with its connection.

        Sends no query; a cancel is seen within a second.
        """
        return self.cancelled()

    def is_stopping(self) -> bool:
        """Whether the worker was asked to stop: the handler has the rest of the grace period.

        A long handler saves its progress and returns ``Snooze(timedelta(0))``; another worker
        goes on.  Sends no query.
        """
        return self.stopping()


Around = Callable[[JobContext], AbstractContextManager[None]]
"""Returns the context manager that a worker enters before a handler and exits after it, in the
handler's thread or coroutine.

The pending changes of a transactional handler's session are flushed before the exit.  An error of
the handler passes through and must not be suppressed; an error that the context manager raises
fails the attempt as an error of the handler does.
"""

_NOTHING = nullcontext()


def nothing_around(_context: JobContext) -> nullcontext[None]:
    return _NOTHING
