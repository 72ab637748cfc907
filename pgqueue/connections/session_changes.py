"""Discards connections whose session state a handler has changed."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import InvalidRequestError

from pgqueue.repository.fast_path import ONLY_WATCHED, is_listened_to
from pgqueue.repository.tables import SLEEPERS

CHANGES_SESSION = re.compile(
    r"(?:^|;)\s*(?:SET(?!\s+(?:LOCAL|CONSTRAINTS|TRANSACTION)\b)|RESET|DISCARD|PREPARE|LISTEN|LOAD"
    r"|DECLARE|CREATE\s+(?:(?:LOCAL|GLOBAL)\s+)?TEMP)\b"
    rf"|\bset_config\s*\(|\bpg_(?:try_)?advisory_lock(?!\({SLEEPERS}\))|\bINTO\s+TEMP",
    re.IGNORECASE,
)
"""Statements whose effect on a connection outlives the transaction.  A reset would also undo what
the application sets for each of its connections, so the connection is closed instead.  The lock
SLEEPERS is excluded: each enqueue tries it, and releases it in the same statement."""

CHANGED = "pgqueue.session_changed"


def watched(engine: Engine) -> Engine:
    """The same engine and pool, with a listener that notes changes of session state."""
    twin = engine.execution_options(**{ONLY_WATCHED: not is_listened_to(engine)})
    watch_session(twin)
    return twin


def watch_session(target: Engine | Connection) -> None:
    if isinstance(target, Connection):
        target.execution_options(**{ONLY_WATCHED: not is_listened_to(target)})
    _listen(target, "before_cursor_execute", _note_change)


def close_if_changed(connection: Connection) -> bool:
    """Close a connection whose session state a handler has changed, so that it is not reused."""
    if not is_changed(connection):
        return False
    del connection.info[CHANGED]
    connection.invalidate()
    return True


def is_changed(connection: Connection) -> bool:
    is_usable = not connection.closed and not connection.invalidated
    return is_usable and CHANGED in connection.info


def _listen(target: Engine | Connection, name: str, listener: Callable[..., None]) -> None:
    try:
        event.listen(target, name, listener)
    except InvalidRequestError:
        # SQLAlchemy before 2.0.38 refuses an engine made by `execution_options` from an engine that
        # was itself made so (its issue 12289), yet calls the listeners of such an engine.
        from sqlalchemy.event.registry import _EventKey

        _EventKey(target, name, listener, target).listen()


def _note_change(connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
    if _changes_session(statement):
        connection.info[CHANGED] = True


@lru_cache(maxsize=1024)
def _changes_session(statement: str) -> bool:
    return CHANGES_SESSION.search(statement) is not None
