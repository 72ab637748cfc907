"""Statements around a transaction: its beginning, its planner settings, a handler's savepoint.

They are sent unchanged, several in one message, and return nothing.
"""

from collections.abc import Iterable

PLANNER = ("enable_sort", "enable_bitmapscan", "enable_seqscan")
"""Off where claims are planned: a plan cached while a table was small would sort or scan it when
it is large.  The statements reach every row by a key and need none of the three."""

PLAN_ONCE = {"plan_cache_mode": "force_generic_plan", "jit": "off"}
"""Each of these statements has one good plan, and planning costs more than execution.  A
generic plan looks expensive, so JIT would compile it, which takes ten times as long again."""

LOCAL = {**dict.fromkeys(PLANNER, "off"), **PLAN_ONCE, "timezone": "'UTC'", "datestyle": "'ISO'"}
PLAN_BY_KEY = "; ".join(f"SET LOCAL {name} = {value}" for name, value in LOCAL.items())

CHECK_CONSTRAINTS = """
    DO $$ BEGIN
        SET CONSTRAINTS ALL IMMEDIATE;
        RAISE EXCEPTION USING ERRCODE = 'PGQ00';
    EXCEPTION WHEN SQLSTATE 'PGQ00' THEN
    END $$
"""
"""Raise the errors of deferred constraints; they stay deferred, as they were before the block."""

GUARD = "SAVEPOINT pgqueue_handler"
RELEASE_GUARD = "RELEASE SAVEPOINT pgqueue_handler"
ONLY_SETTLE_FOLLOWS = "SET LOCAL idle_in_transaction_session_timeout = 20000"
"""A worker that is frozen between its settle and its COMMIT has a lock on the lease.  This timeout
ends it before the grace period of such workers, so that others may rescue."""
ONE_BY_KEY = "SET LOCAL enable_seqscan = off"
"""All that the end of one success needs: it sorts nothing, prints no time, and its plan with a key
cannot read a bitmap."""
AFTER_HANDLER = f"{RELEASE_GUARD}; {PLAN_BY_KEY}; {ONLY_SETTLE_FOLLOWS}"
"""Sent after a handler.  A handler that has ended the transaction has ended the savepoint too, and
its job fails: the server reports it, whatever the handler did or SQLAlchemy assumes."""
AFTER_SUCCESS = f"{RELEASE_GUARD}; {ONE_BY_KEY}; {ONLY_SETTLE_FOLLOWS}"
"""The same before the end of a plain success, which every setting makes dearer."""

NOTHING = "SELECT 1"


def begin(isolation_level: str, statements: str) -> str:
    return f"BEGIN ISOLATION LEVEL {isolation_level}; {statements}"


def set_local(values: Iterable[tuple[str, object]]) -> str:
    """Return settings for the rest of a transaction."""
    return "; ".join(f"SET LOCAL {name} = {value}" for name, value in values)


def set_config(number: int) -> str:
    """Return SQL for this number of session settings; parameters are names and values in turn."""
    calls = ", ".join(["pg_catalog.set_config(%s, %s, false)"] * number)
    return f"SELECT {calls}"


def listen(channel: str) -> str:
    return f"LISTEN {channel}"
