"""Settings of the server, by the purpose of a connection."""

from pgqueue.database.keepalive import BRIEF, NETWORK
from pgqueue.repository.tables import SEARCH_PATH
from pgqueue.repository.transactions import PLAN_ONCE, PLANNER

UNICODE = {"client_encoding": "UTF8"}
"""PGCLIENTENCODING or the engine may name another encoding.  The server then refuses a claim that
returns a character outside of it, and with it every later claim of the worker."""

STYLES = {
    "timezone": "UTC",
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "1",
}
"""How the server writes values, whatever the database or the role sets.  Claims return times as
text that sorts in their order: in one zone, the year first.  On the application's connections,
which keep their settings, statements return times as seconds (``repository.reading``)."""

NOTHING_HIDDEN = {"row_security": "off"}
"""The server refuses a statement from which row security would hide rows: a hidden row looks as if
it did not exist."""

OWN = {"search_path": SEARCH_PATH, **NETWORK, **UNICODE, **STYLES, **NOTHING_HIDDEN}
"""For connections that run only our statements and no handler's."""

CLAIMING = {
    **dict.fromkeys(PLANNER, "off"),
    **PLAN_ONCE,
    **OWN,
    "default_transaction_isolation": "read committed",
    "idle_in_transaction_session_timeout": "60000",
}

ADMITTING = {
    **CLAIMING,
    # Other workers wait for this transaction: it must end soon, also if its process is frozen.
    "lock_timeout": "2000",
    "idle_in_transaction_session_timeout": "5000",
    # An admission that a crash of the server undoes is repeated.
    "synchronous_commit": "off",
}

BEATING = {**OWN, **BRIEF, **PLAN_ONCE}

UPKEEP = {
    **BEATING,
    # An application may lock tables for minutes, and a statement that waits for the lock delays all
    # statements that ask for it later: the thread tries again instead.
    "lock_timeout": "250",
}

TIMERS = {**dict.fromkeys(PLANNER, "off"), **UPKEEP}

LOOKING = {
    **TIMERS,
    # What a crash of the server undoes, the next sweep does again.
    "synchronous_commit": "off",
}

JANITOR = {
    **UPKEEP,
    # What a crash of the server undoes is repeated.
    "synchronous_commit": "off",
}

WAITING = {
    **BEATING,
    # The connection of an enqueuer, whose role may not see the jobs of others.
    "row_security": "on",
}

LIMITS = ("idle_in_transaction_session_timeout", "transaction_timeout")

FIRST_WITH_TRANSACTION_TIMEOUT = (17,)
