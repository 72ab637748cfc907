"""Starts, joins and stops a private PostgreSQL server."""

# ruff: noqa: S603 - starting programs is what this module is for

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO
from urllib.parse import quote

from pgqueue.embedded.account import Account, PostgresFailed, environment, server_account
from pgqueue.embedded.programs import NoPostgres, major_version, programs_for

if sys.platform != "win32":
    import fcntl

_PATIENCE = 30.0  # seconds; a server that crashed may have to replay its log first
_LONGEST_SOCKET_DIRECTORY = 80  # bytes; a socket's whole path may have 104 on macOS, 108 on Linux
_NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class EmbeddedPostgres:
    """A private PostgreSQL, in a temporary directory or in a given one.

    The server ends when its starting process ends.  A given directory keeps its data; a second
    process that starts a server in it joins the running server.  With `durable=False`, which is
    meant for tests, a power failure may lose committed rows.
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
        self._given = None if directory is None else Path(directory).absolute()
        self._directory = self._given
        self._settings = dict(settings or {})
        self._durable = durable
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._starter_pid: int | None = None

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
        url = f"postgresql+psycopg://postgres@/postgres?host={quote(str(self._socket_directory))}"
        # Omit the default port, so that the URL is easy to copy, unless PGPORT would replace it.
        is_usual = self._port == "5432" and "PGPORT" not in os.environ
        return url if is_usual else f"{url}&port={self._port}"

    @property
    def is_started_here(self) -> bool:
        """Whether this object started the server; False if it has joined a running server."""
        return self._supervisor is not None

    def start(self) -> str:
        """Start the server, or join the one that runs in this directory.  Return its URL."""
        self._starter_pid = os.getpid()
        try:
            self._prepare()
            self._serve()
        except BaseException:
            self.stop()
            raise
        return self.url

    def stop(self) -> None:
        """Stop the server if this object started it, and remove a temporary directory."""
        if self._directory is None or self._starter_pid != os.getpid():
            return  # never started, or a forked child's copy of its parent's server
        self._release_supervisor()
        if self._is_ready() and not self._is_supervised():
            self._end(signal.SIGINT)
        if self._socket_directory != self._data:
            with suppress(OSError):  # a joined server still uses it
                self._socket_directory.rmdir()
        if self._given is None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def restart(self) -> None:
        """Stop the server and start it again, with the same data and the same URL."""
        self._end(signal.SIGINT)
        self.start()

    def crash(self) -> None:
        """End the server immediately, as in a crash; `start()` recovers committed rows."""
        self._end(signal.SIGQUIT)

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _lock(self) -> Path:
        return self.directory / "supervisor.lock"

    @property
    def _log(self) -> Path:
        return self.directory / "server.log"

    @property
    def _port(self) -> str:
        return self._settings.get("port", "5432")

    @property
    def _socket_directory(self) -> Path:
        if len(os.fsencode(self._data)) <= _LONGEST_SOCKET_DIRECTORY:
            return self._data
        name = hashlib.sha256(os.fsencode(self._data)).hexdigest()[:12]
        return Path(tempfile.gettempdir(), f"pgqueue-{name}")

    def _prepare(self) -> None:
        self._account = account = server_account()
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="pgqueue-"))
            account.let_in(self._directory)
        elif not self._directory.exists():
            self._directory.mkdir(parents=True, exist_ok=True)
            account.let_in(self._directory)
        self._binaries = programs_for(account, directory=self.directory)
        if not (self._data / "PG_VERSION").exists():
            self._create_cluster()
        self._refuse_other_data()
        if self._socket_directory != self._data:
            _claim(self._socket_directory, account)

    def _create_cluster(self) -> None:
        # Created under another name first: a killed process must not leave an incomplete cluster.
        draft = Path(tempfile.mkdtemp(prefix="new-", dir=self.directory))
        try:
            self._account.give(draft)
            options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]
            if not self._durable:
                options.append("--no-sync")
            self._account.run([str(self._binaries / "initdb"), f"--pgdata={draft}", *options])
            with suppress(OSError):  # another process was first
                draft.rename(self._data)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _refuse_other_data(self) -> None:
        try:
            made_by = (self._data / "PG_VERSION").read_text().strip()
        except OSError as error:
            raise PostgresFailed(
                f"{self._data} holds something else than PostgreSQL's data: choose another"
                " directory."
            ) from error
        found = major_version(self._binaries, self._account)
        if made_by != found:
            raise PostgresFailed(
                f"{self.directory} holds data of PostgreSQL {made_by}, but {self._binaries} is"
                f" PostgreSQL {found}: set PGQUEUE_PG_BIN to the programs of version {made_by},"
                " or choose another directory."
            )

    def _serve(self) -> None:
        give_up_at = time.monotonic() + _PATIENCE
        self._wait_until_ready(give_up_at)
        while not self._is_ready():
            report_from = self._log.stat().st_size if self._log.exists() else 0
            self._start_supervisor()
            self._wait_until_ready(give_up_at)
            if self._is_ready():
                return
            report = self._log.read_bytes()[report_from:].decode(errors="replace")
            # The lock of a killed server is held until its last process has ended.
            is_held = "lock file" in report or "pre-existing shared memory" in report
            if not is_held or time.monotonic() > give_up_at:
                raise PostgresFailed(
                    f"PostgreSQL, run by {self._account.name!r}, did not start:\n{report}"
                )
            time.sleep(0.1)

    def _wait_until_ready(self, give_up_at: float) -> None:
        while self._supervisor is not None and self._supervisor.poll() is None:
            if self._is_ready() or time.monotonic() > give_up_at:
                return
            time.sleep(0.01)

    def _start_supervisor(self) -> None:
        self._release_supervisor()
        plan = {
            "command": self._command(),
            "process_options": self._account.process_options,
            "lock": str(self._lock),
            "temporary": None if self._given else str(self.directory),
        }
        script = Path(__file__).with_name("supervisor.py")
        with self._append_to(self._log) as output:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), json.dumps(plan)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd="/",
                env=environment(),
                start_new_session=True,  # Ctrl-C must reach the starting process only
            )

    def _release_supervisor(self) -> None:
        if self._supervisor is not None:
            self._supervisor.communicate()  # closes the pipe and waits for the supervisor
            self._supervisor = None

    def _command(self) -> list[str]:
        settings = {
            "listen_addresses": "",
            **({} if self._durable else _NOT_DURABLE),
            **self._settings,
            "port": self._port,
            "unix_socket_directories": str(self._socket_directory),
            "unix_socket_permissions": "0700",  # every client is a superuser
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [str(self._binaries / "postgres"), "-D", str(self._data), *options]

    def _is_ready(self) -> bool:
        try:
            state = (self._data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        if len(state) < 8 or state[7].strip() != "ready":
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            path = self._socket_directory / f".s.PGSQL.{self._port}"
            return probe.connect_ex(str(path)) == 0

    def _is_supervised(self) -> bool:
        with self._append_to(self._lock) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _append_to(self, path: Path) -> IO[bytes]:
        """Open a file of ours; never through a link that another user has put in its place."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        try:
            return os.fdopen(os.open(path, flags, 0o666), "ab")
        except OSError as error:
            raise PostgresFailed(
                f"{path} cannot be written: {error.strerror}. Remove it, or choose another "
                "directory."
            ) from error

    def _end(self, how: signal.Signals) -> None:
        pid_file = self._data / "postmaster.pid"
        if not self._is_ready():
            return  # another program may have its process id by now
        os.kill(int(pid_file.read_text().split()[0]), how)
        give_up_at = time.monotonic() + _PATIENCE
        while pid_file.exists():
            if time.monotonic() > give_up_at:
                raise PostgresFailed(f"The PostgreSQL in {self.directory} does not stop.")
            time.sleep(0.01)
        if self._supervisor is not None:
            self._supervisor.wait()


def _claim(folder: Path, account: Account) -> None:
    """Create a folder with a fixed name.  Raises if another user has created it first."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        account.give(folder)
    found = folder.lstat()
    is_ours = found.st_uid in (account.uid, os.geteuid()) and not found.st_mode & 0o077
    if not is_ours or not stat.S_ISDIR(found.st_mode):
        raise PostgresFailed(f"{folder} belongs to someone else: choose a shorter directory.")
