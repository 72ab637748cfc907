"""What a handler may know about the job it runs."""

from collections.abc import Callable
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
    """1 for the first."""
    max_attempts: int
    queue: str
    task: str
    session: Any = None
    """The Session or AsyncSession of a transactional handler, else None.  What is written
    through it commits together with the job's completion, or not at all."""
    cancelled: Callable[[], bool] = field(default=_never, repr=False)

    def is_cancelled(self) -> bool:
        """Whether the handler should stop: the job was cancelled, timed out or taken away.

        Costs nothing to ask; a cancel is seen within a second.
        """
        return self.cancelled()
