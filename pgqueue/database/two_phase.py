"""Commits in two phases on Citus, where a transaction may write rows of several nodes.

Citus does not see what a transaction writes to plain tables, as ours are.  If all else that it
writes is on one other node, Citus commits there first and here afterwards.  A crash of this node in
between would leave the application's row without its job.  In two phases both are kept or neither.
"""

from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Pool, TwoPhaseTransaction

from pgqueue.repository.nodes import TABLE_EXISTS, WRITE_NO_ROW

IN_TWO_PHASES = "pgqueue.in_two_phases"
"""The name in ``connection.info`` of the transaction that will commit in two phases."""

_has_citus: WeakKeyDictionary[Pool, bool] = WeakKeyDictionary()
"""By pool, which an engine shares with its copies of other ``execution_options``."""


def commit_in_two_phases(connection: Connection) -> None:
    """Make the transaction commit in two phases, if it writes to other nodes of a Citus cluster.

    Asks the database once for each engine; without Citus, sends nothing else.  A rollback to a
    savepoint does not undo it.
    """
    pool = connection.engine.pool
    has_citus = _has_citus.get(pool)
    if has_citus is None:
        has_citus = _has_citus[pool] = bool(connection.scalar(TABLE_EXISTS))
    # All drivers have the attribute autocommit.
    if not has_citus or getattr(connection.connection.dbapi_connection, "autocommit", False):
        return
    transaction = connection.get_transaction()
    if isinstance(transaction, TwoPhaseTransaction):
        return  # the application prepares it itself, and Citus allows that on one node only
    if transaction is None or connection.info.get(IN_TWO_PHASES) is not transaction:
        connection.execute(WRITE_NO_ROW)
        connection.info[IN_TWO_PHASES] = connection.get_transaction()
