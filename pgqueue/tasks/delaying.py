"""Warns of ``delay()`` beside an open transaction, which its job does not join, and in an event
loop, which it blocks."""

import asyncio
import warnings
from contextvars import ContextVar

from sqlalchemy.orm import Session

from pgqueue.errors import DelayInEventLoop, DelayInTransaction

handler_session: ContextVar[Session | None] = ContextVar("pgqueue_handler_session", default=None)
"""The Session of the transactional handler that runs in this thread or asyncio task."""


def warn_of_open_transaction(task_name: str, callers: Session | None) -> None:
    """Warn if the handler's session, or the one that a framework keeps, has a transaction.

    Python shows a warning once for each line that causes it.
    """
    for session in (handler_session.get(), callers):
        if session is not None and session.in_transaction():
            warnings.warn(
                f"task {task_name}: delay() commits its job at once, while a session of this code "
                "has a transaction open: if that is rolled back, the job runs all the same. Use "
                "enqueue(session, ...), which joins the transaction; where delay() is meant, "
                "silence this with warnings.filterwarnings('ignore', "
                "category=pgqueue.DelayInTransaction)",
                DelayInTransaction,
                stacklevel=3,
            )
            return


def warn_of_event_loop(task_name: str) -> None:
    """Warn if an event loop runs in this thread."""
    if asyncio._get_running_loop() is not None:
        warnings.warn(
            f"task {task_name}: delay() waits for the database, and blocks the event loop that "
            "runs in this thread. Write `await task.delay_async(...)`; to silence this, call "
            "warnings.filterwarnings('ignore', category=pgqueue.DelayInEventLoop)",
            DelayInEventLoop,
            stacklevel=3,
        )
