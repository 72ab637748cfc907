"""What the tests ask of a private server and of its processes."""

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
