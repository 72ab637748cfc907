"""Where a transaction begins, and how it ends.  Whoever opened it ends it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import psycopg
from psycopg.pq import DiagnosticField, ExecStatus
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from pgqueue import redaction
from pgqueue.changed_sessions import CHANGED
from pgqueue.guests import ENDED, TransactionEnded, be_guest
from pgqueue.network import (
    BRIEF,
    NETWORK,
    keep_from_children,
    name_of_connection,
    notice_loss_of_server,
)
from pgqueue.statements.tables import SEARCH_PATH

logger = redaction.logger(__name__)

DRIVER = "postgresql+psycopg"

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
BEFORE_SETTLE = f"SET CONSTRAINTS ALL IMMEDIATE; {PLAN_BY_KEY}"
"""At the end of a handler in transaction mode: what would fail its COMMIT fails now."""
BEFORE_SETTLE_IN_BATCH = f"""
    DO $$ BEGIN
        SET CONSTRAINTS ALL IMMEDIATE;
        RAISE EXCEPTION USING ERRCODE = 'PGQ00';
    EXCEPTION WHEN SQLSTATE 'PGQ00' THEN
    END $$;
    {PLAN_BY_KEY}
"""
"""The same where other handlers follow in the transaction: their constraints stay deferred, as
they were before the block.  Not by ROLLBACK TO SAVEPOINT: whenever the driver reads ROLLBACK it
throws away what it has prepared, and each statement would be planned anew for each job."""

LIMITS = ("idle_in_transaction_session_timeout", "transaction_timeout")
FIRST_WITH_TRANSACTION_TIMEOUT = (17,)

GUARD = "SAVEPOINT pgqueue_handler"
RELEASE_GUARD = "RELEASE SAVEPOINT pgqueue_handler"
UNDO_HANDLER = "ROLLBACK TO SAVEPOINT pgqueue_handler"
ONLY_SETTLE_FOLLOWS = "SET LOCAL idle_in_transaction_session_timeout = 20000"
"""A worker that is frozen between its settle and its COMMIT has a lock on the lease.  It is gone
before the grace of such workers is over, and others may rescue."""
AFTER_HANDLER = f"{RELEASE_GUARD}; {PLAN_BY_KEY}; {ONLY_SETTLE_FOLLOWS}"
"""Around a handler.  Whoever has ended the transaction has ended the savepoint as well, and its
job fails: the server knows it whatever the handler did, and whatever SQLAlchemy believes."""


def worker_engine(engine: Engine) -> Engine:
    """The engine a worker uses: the application's own, or its twin on psycopg."""
    if engine.dialect.driver == "psycopg":
        return engine
    # The number of slots is the limit.
    return create_engine(engine.url.set(drivername=DRIVER), max_overflow=1000)


@contextmanager
def worker_engine_for_now(engine: Engine) -> Iterator[Engine]:
    """:func:`worker_engine`, whose twin leaves no connection open when it is no longer needed."""
    on_psycopg = worker_engine(engine)
    try:
        yield on_psycopg
    finally:
        if on_psycopg is not engine:
            on_psycopg.dispose()


def connection_parameters(engine: Engine) -> dict[str, Any]:
    """How an engine connects, as parameters of libpq, learnt from a connection it makes.

    Its URL does not tell all: ``connect_args``, a ``creator`` or a listener for ``do_connect``
    may add a certificate, options or a password.
    """
    with worker_engine_for_now(engine) as twin, own_connection(twin, {}) as connection:
        # Not psycopg's get_parameters(): without a port of 5432, PGPORT would replace it.
        options = driver_connection(connection).pgconn.info
        return {each.keyword.decode(): each.val.decode() for each in options if each.val}


@contextmanager
def own_connection(
    engine: Engine,
    settings: Mapping[str, str],
    *,
    isolation_level: IsolationLevel = "AUTOCOMMIT",
    purpose: str = "",
) -> Iterator[Connection]:
    """A connection that is taken out of the pool, set up, and closed at the end.

    ``purpose``: what a worker has it for, for its name in ``pg_stat_activity``.
    """
    # From a pool of its own: handlers that hold all of the application's must not keep a worker
    # from its heartbeat.
    _get_to_know(engine)
    private = Engine(engine.pool.recreate(), engine.dialect, engine.url)
    with private.connect() as connection:
        connection.execution_options(isolation_level=isolation_level)
        connection.detach()
        name = name_of_connection(driver_connection(connection), purpose)
        configure(connection, {**settings, **name})
        yield connection


def _get_to_know(engine: Engine) -> None:
    """Have the dialect ask the server what it is, through the pool that others use.

    It does so at its first connection; whoever comes meanwhile waits only in the same pool, and
    would meet a dialect that knows half in another.
    """
    if not hasattr(engine.dialect, "default_isolation_level"):
        with engine.connect() as connection:
            connection.detach()  # or it would stay in the pool, and nobody may need it there


def configure(connection: Connection, settings: Mapping[str, str]) -> None:
    """Set what the server lets us set; what it does not know, it does without."""
    keep_from_children(driver := driver_connection(connection))
    notice_loss_of_server(driver.fileno(), settings)
    if settings and not _set(connection, settings):
        for name, value in settings.items():
            _set(connection, {name: value})


def _set(connection: Connection, settings: Mapping[str, str]) -> bool:
    """All in one round trip, or none; whether the server has accepted them."""
    calls = ", ".join(["pg_catalog.set_config(%s, %s, false)"] * len(settings))
    try:
        connection.exec_driver_sql(f"SELECT {calls}", tuple(chain(*settings.items())))
        connection.commit()
    except DBAPIError as error:
        if error.connection_invalidated:
            raise
        connection.rollback()
        logger.info("the server does not accept one of %s: %s", list(settings), error.orig)
        return False
    return True


def let_server_notice_loss(connection: Connection) -> None:
    """Give a connection of the application's pool, once, the settings of NETWORK.

    Or the rows that a handler has locked would stay locked for hours when its host vanishes,
    while its job, rescued long since, waits for them on another.
    """
    if NOTICES_LOSS not in connection.info:
        configure(connection, NETWORK)
        connection.info.pop(CHANGED, None)  # not by the handler, and fit for whoever is next
        connection.info[NOTICES_LOSS] = True


def leave_autocommit(connection: Connection) -> None:
    """Have transactions on a connection of the application's, whatever its engine does by itself.

    SQLAlchemy would set their isolation each time the pool gives a connection out, and reset it;
    it is said by :func:`begin_now` anyway.
    """
    if driver_connection(connection).autocommit:
        connection.execution_options(isolation_level="READ COMMITTED")


NOTICES_LOSS = "pgqueue.notices_loss"


READ_COMMITTED: IsolationLevel = "READ COMMITTED"
STRICTER: tuple[IsolationLevel, ...] = ("REPEATABLE READ", "SERIALIZABLE")


def isolation_of(engine: Engine) -> IsolationLevel:
    """The level at which transactions of an application's engine begin; asks the server.

    Of an engine in AUTOCOMMIT, on which handlers have transactions all the same, the usual one.
    """
    with engine.connect() as connection:
        connection.detach()
        level = connection.get_isolation_level()
        return level if level in STRICTER else READ_COMMITTED


def begin_now(
    connection: Connection,
    settings: str = GUARD,
    *,
    isolation_level: IsolationLevel = READ_COMMITTED,
) -> None:
    """Begin a transaction on the server, with these statements, in one round trip.

    The driver would send BEGIN before the first statement of a handler; a connection that has
    died in the pool is to be found before that, so that it costs the job no attempt.
    """
    connection.begin()
    if isinstance(driver_connection(connection), psycopg.Connection):
        settings = f"BEGIN ISOLATION LEVEL {isolation_level}; {settings}"
    set_now(connection, settings)


def set_now(connection: Connection, statements: str) -> None:
    """Send statements that return nothing, in one message and without the work of a cursor."""
    driver = driver_connection(connection)
    if not isinstance(driver, psycopg.Connection):
        connection.exec_driver_sql(statements)
        return
    with suppress(psycopg.Error):  # it is closed
        done = driver.pgconn.exec_(statements.encode())
        if done.status == ExecStatus.COMMAND_OK:
            return
        state = (done.error_field(DiagnosticField.SQLSTATE) or b"").decode()
        if state in ENDED:
            raise TransactionEnded(done.error_message.decode(errors="replace").strip())
    # SQLAlchemy tells: the transaction, or the connection, has failed before.
    connection.exec_driver_sql(statements)


def plan_freely(connection: Connection) -> str:
    """What undoes PLAN_BY_KEY for a handler: the settings this connection has without it."""
    return settings_of(connection, LOCAL)


def settings_of(connection: Connection, names: Iterable[str]) -> str:
    """What gives a transaction the settings that this connection has now."""
    values = ", ".join(
        f"pg_catalog.quote_literal(pg_catalog.current_setting('{name}'))" for name in names
    )
    found = connection.exec_driver_sql(f"SELECT {values}").one()
    return "; ".join(
        f"SET LOCAL {name} = {value}" for name, value in zip(names, found, strict=True)
    )


def limits_of(connection: Connection) -> list[str]:
    """The settings by which this server ends a transaction that takes long."""
    version = connection.dialect.server_version_info or (0,)
    return list(LIMITS) if version >= FIRST_WITH_TRANSACTION_TIMEOUT else list(LIMITS[:1])


def joined_session(
    sessions: sessionmaker[Session],
    connection: Connection,
    *,
    begin_again: Callable[[Connection], None],
) -> Session:
    """A Session inside a transaction that is not its own.

    A handler that calls its commit() and rollback() can neither drop the lock on its message
    nor publish half of its work.
    """
    session = sessions(bind=connection)
    be_guest(session, connection, begin_again=begin_again)
    return session


def driver_connection(connection: Connection) -> Any:
    """The psycopg connection itself, also of a connection that is out of the pool, or async."""
    dbapi_connection: Any = connection.connection.dbapi_connection
    return getattr(dbapi_connection, "driver_connection", dbapi_connection)


def backend_pid(connection: Connection) -> int:
    """The server process behind a connection."""
    pid: int = driver_connection(connection).info.backend_pid
    return pid
