"""The PostgreSQL server of a test run, and databases that are gone afterwards."""

import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from sqlalchemy import URL, Engine, create_engine, make_url

from pgqueue.database.opening import DRIVER
from pgqueue.embedded import TEMPORARY, EmbeddedPostgres, NoPostgres
from pgqueue.repository.databases import create_database, drop_database

if sys.platform != "win32":
    import fcntl

URL_VARIABLE = "PGQUEUE_TEST_URL"
"""The environment variable that names a server of your own."""
MEMORY = "/dev/shm"  # noqa: S108 - a folder of the operating system, not a file of ours
ROOM = 4 * 2**30
SETTINGS = {"max_connections": "200", "max_wal_size": "256MB"}
ASKED_FROM = (15,)
"""The first version of PostgreSQL that must be asked to copy files."""


@contextmanager
def run_server(run_id: str | None) -> Iterator[str]:
    """The URL of the server that ``PGQUEUE_TEST_URL`` names, or of one for this run.

    ``run_id`` is common to all processes of a run, which share the server; None if there is only
    this one.
    """
    if given := os.environ.get(URL_VARIABLE):
        yield as_text(make_url(given).set(drivername=DRIVER))
    elif run_id is None:
        server = EmbeddedPostgres(durable=False, settings=SETTINGS)
        _start(server)
        yield server.url
        server.stop()
    else:
        with _shared_server(run_id) as url:
            yield url


@contextmanager
def _shared_server(run_id: str) -> Iterator[str]:
    """Start or join the server of a run.  The process that has started the server stops it, when
    all others have left."""
    # Short: the path of a socket has at most 104 bytes on macOS, whose temporary folder takes 49.
    directory = Path(memory_directory() or tempfile.gettempdir(), TEMPORARY + run_id[:12])
    server = EmbeddedPostgres(directory, durable=False, settings=SETTINGS)
    directory.mkdir(exist_ok=True)
    directory.chmod(0o711)  # the server of root runs under another account
    with (directory / "users").open("ab") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        _start(server)
        try:
            yield server.url
        finally:
            if server.is_started_here:
                fcntl.flock(users, fcntl.LOCK_UN)
                fcntl.flock(users, fcntl.LOCK_EX)  # waits for the others
                server.stop()
                shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def fresh_database(server_url: str, *, template_url: str | None = None) -> Iterator[str]:
    """A new database, empty or a copy of the template, which is gone afterwards."""
    url = make_url(server_url).set(database=f"pgqueue_test_{uuid.uuid4().hex[:16]}")
    name, template = str(url.database), None
    if template_url is not None:
        template = make_url(template_url).database
    server = _server(server_url)
    with server.connect() as connection:
        copies = (server.dialect.server_version_info or (0,)) >= ASKED_FROM
        connection.execute(create_database(name, template=template, copies_files=copies))
    try:
        yield as_text(url)
    finally:
        with server.connect() as connection:
            connection.execute(drop_database(name))


@cache
def _server(url: str) -> Engine:
    """The server itself.  Keeps its connection: to open two for each test takes a third of the time
    that a database takes."""
    return create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)


def memory_directory() -> str | None:
    """A folder in memory with room for a server; None if there is none.

    A database is three hundred files, and on some disks making them takes a fifth of a second.
    """
    if not os.path.isdir(MEMORY) or shutil.disk_usage(MEMORY).free < ROOM:
        return None
    # The server of root may keep its programs there.
    return None if os.statvfs(MEMORY).f_flag & os.ST_NOEXEC else MEMORY


def as_text(url: URL) -> str:
    return url.render_as_string(hide_password=False)


def _start(server: EmbeddedPostgres) -> None:
    try:
        server.start()
    except NoPostgres as error:
        raise NoPostgres(f"{error}  In tests, {URL_VARIABLE} names a server instead.") from error
