"""Settings of the server, by what a connection is for."""

from pgqueue.connections.keepalive import BRIEF, NETWORK
from pgqueue.statements.tables import SEARCH_PATH
from pgqueue.statements.transactions import PLAN_ONCE, PLANNER

UNICODE = {"client_encoding": "UTF8"}
"""PGCLIENTENCODING or the engine may name another encoding.  The server refuses a claim that brings
a character outside of it, and with it every later claim of the worker."""

OWN = {"search_path": SEARCH_PATH, **NETWORK, **UNICODE}
"""Of a connection that runs our statements and no handler's."""

CLAIMING = {
    **dict.fromkeys(PLANNER, "off"),
    **PLAN_ONCE,
    **OWN,
    # Times travel as text that sorts as they do: in one zone, the year first.
    "timezone": "UTC",
    "datestyle": "ISO",
    "default_transaction_isolation": "read committed",
    "idle_in_transaction_session_timeout": "60000",
}

STAMPING = {**CLAIMING, "lock_timeout": "250"}
"""A stamp waits while a transaction of the same slot is open.  A migration that waits for that
transaction, and for which the stamp waits in its turn, would make a circle no server can see."""

UPKEEP = {**OWN, **BRIEF, "datestyle": "ISO", **PLAN_ONCE}

HANDLING = {**NETWORK, **UNICODE, "default_transaction_isolation": "read committed"}
"""The search_path stays the application's, whose handlers use it."""

LIMITS = ("idle_in_transaction_session_timeout", "transaction_timeout")

FIRST_WITH_TRANSACTION_TIMEOUT = (17,)
