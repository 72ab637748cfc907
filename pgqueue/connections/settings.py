"""Settings of the server, by what a connection is for."""

from pgqueue.connections.keepalive import BRIEF, NETWORK
from pgqueue.statements.tables import SEARCH_PATH

PLANNER = ("enable_sort", "enable_bitmapscan", "enable_seqscan")
"""Off where claims are planned: a plan cached while a table was small would sort or scan it
when it is large.  The statements reach every row by a key and need none of the three."""


PLAN_ONCE = {"plan_cache_mode": "force_generic_plan", "jit": "off"}
"""There is one good plan for each of these statements, and planning costs more than running it.
Made for any number of rows it looks dear, and compiling it would take ten times as long again."""


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


LOCAL = {
    **dict.fromkeys(PLANNER, "off"),
    **PLAN_ONCE,
    "timezone": "'UTC'",
    "datestyle": "'ISO'",
}


PLAN_BY_KEY = "; ".join(f"SET LOCAL {name} = {value}" for name, value in LOCAL.items())


LIMITS = ("idle_in_transaction_session_timeout", "transaction_timeout")


FIRST_WITH_TRANSACTION_TIMEOUT = (17,)
