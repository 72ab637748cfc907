"""How connections are opened and set up: those of a worker, and those it borrows from a pool."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.exc import DBAPIError

from pgqueue import redaction
from pgqueue.connections.keepalive import (
    NETWORK,
    keep_from_children,
    name_of_connection,
    notice_loss_of_server,
)
from pgqueue.connections.session_changes import CHANGED
from pgqueue.statements.transactions import set_config

logger = redaction.logger(__name__)

DRIVER = "postgresql+psycopg"


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
    try:
        connection.exec_driver_sql(set_config(len(settings)), tuple(chain(*settings.items())))
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


def driver_connection(connection: Connection) -> Any:
    """The psycopg connection itself, also of a connection that is out of the pool, or async."""
    dbapi_connection: Any = connection.connection.dbapi_connection
    return getattr(dbapi_connection, "driver_connection", dbapi_connection)


def backend_pid(connection: Connection) -> int:
    """The server process behind a connection."""
    pid: int = driver_connection(connection).info.backend_pid
    return pid
