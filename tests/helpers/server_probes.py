"""What the tests ask of a private server and of its processes."""

import os

from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import OperationalError

from chaos.workers import wait_until as wait_until
from pgqueue.embedded import EmbeddedPostgres


def query(url: str, statement: str) -> object:
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        value: object = connection.scalar(text(statement))
        return value


def execute(url: str, statement: str) -> None:
    with create_engine(url, poolclass=NullPool).begin() as connection:
        connection.execute(text(statement))


def accepts_connections(url: str) -> bool:
    try:
        return query(url, "SELECT 1") == 1
    except OperationalError:
        return False


def postmaster(server: EmbeddedPostgres) -> int:
    return int((server.directory / "data" / "postmaster.pid").read_text().split()[0])


def kill_supervisor(server: EmbeddedPostgres) -> None:
    assert server._supervisor is not None
    server._supervisor.kill()
    server._supervisor.wait()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
