"""What a handler may know about the job it runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class JobContext:
    """The job that is running, handed to a handler that asks for it in its first parameters."""

    job_id: int
    """0 when the task is called as a plain function."""
    attempt: int
    """1 for the first; after a Snooze the same once more."""
    max_attempts: int
    queue: str
    task: str
    session: Any = None
    """The Session or AsyncSession of a transactional handler, else None.  What is written
    through it commits together with the job's completion, or not at all."""
    cancelled: Callable[[], bool] = field(default=_never, repr=False)

    def is_cancelled(self) -> bool:
        """Whether the handler should stop: its job was cancelled, timed out or taken away, or
        its transaction has ended with its connection.

        Costs nothing to ask; a cancel is seen within a second.
        """
        return self.cancelled()


Around = Callable[[JobContext], AbstractContextManager[None]]
"""What a worker enters before a handler and leaves after it, in the handler's thread or coroutine.

What a transactional handler left pending in its session is written before it is left.  An error
of the handler passes through and may not be swallowed; one that it raises itself fails the
attempt as an error of the handler does.
"""

_NOTHING = nullcontext()


def nothing_around(_context: JobContext) -> AbstractContextManager[None]:
    return _NOTHING
