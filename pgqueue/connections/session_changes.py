"""What a handler leaves on a connection: noticed, so that the next one finds nothing of it."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.event.registry import _EventKey
from sqlalchemy.exc import InvalidRequestError

from pgqueue.connections.fast_path import ONLY_WATCHED, is_listened_to
from pgqueue.statements.tables import SLEEPERS

CHANGES_SESSION = re.compile(
    r"(?:^|;)\s*(?:SET(?!\s+(?:LOCAL|CONSTRAINTS|TRANSACTION)\b)|RESET|DISCARD|PREPARE|LISTEN|LOAD"
    r"|DECLARE|CREATE\s+(?:(?:LOCAL|GLOBAL)\s+)?TEMP)\b"
    rf"|\bset_config\s*\(|\bpg_(?:try_)?advisory_lock(?!\({SLEEPERS}\))|\bINTO\s+TEMP",
    re.IGNORECASE,
)
"""What outlives its transaction on a connection.  Resetting it would also undo what the
application sets for each of its connections, so such a connection is closed instead.  The lock
of the sleepers is tried by each enqueue, and given back by the same statement."""

CHANGED = "pgqueue.session_changed"


def watched(engine: Engine) -> Engine:
    """The same engine and pool; notices when a handler changes what outlives its transaction."""
    twin = engine.execution_options(**{ONLY_WATCHED: not is_listened_to(engine)})
    watch_session(twin)
    return twin


def watch_session(target: Engine | Connection) -> None:
    if isinstance(target, Connection):
        target.execution_options(**{ONLY_WATCHED: not is_listened_to(target)})
    _listen(target, "before_cursor_execute", _note_change)


def close_if_changed(connection: Connection) -> bool:
    """Keep a connection whose session a handler has changed from whoever would get it next."""
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
        # SQLAlchemy before 2.0.38 refuses an engine made of an engine that was made of another by
        # `execution_options` (its issue 12289); such an engine calls its listeners all the same.
        _EventKey(target, name, listener, target).listen()


def _note_change(connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
    if _changes_session(statement):
        connection.info[CHANGED] = True


@lru_cache(maxsize=1024)
def _changes_session(statement: str) -> bool:
    return CHANGES_SESSION.search(statement) is not None
