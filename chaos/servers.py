"""What a scenario does to its own server's disk, and the standby that takes over from it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import NullPool, create_engine, text

from chaos.environment import Environment
from pgqueue.embedded.programs import environment, programs_for, server_account

SPARE = 12
"""Megabytes that are left on the small disk."""


class Disk:
    """A small disk that holds the server's tables; its log is on another."""

    def __init__(self, folder: Path) -> None:
        self._filler = folder / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(65536)) == 65536:
                    pass
            except OSError:
                return

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)


@contextmanager
def small_disk(environment: Environment) -> Iterator[Disk]:
    """Move the environment's own server to a small disk, in memory.  Needs root."""
    server, account = environment.server, server_account()
    server.stop()
    data = server.directory / "data"
    before = data.rename(server.directory / "before")
    log = (before / "pg_wal").rename(server.directory / "log")
    used = sum(file.stat().st_size for file in before.rglob("*") if file.is_file())
    options = f"size={used // 2**20 + SPARE}m,mode=0700,uid={account.uid},gid={account.gid}"
    data.mkdir()
    _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(data))
    try:
        _run("cp", "-a", f"{before}/.", str(data))
        (data / "pg_wal").symlink_to(log)
        os.chown(data / "pg_wal", account.uid, account.gid, follow_symlinks=False)
        server.start()
        yield Disk(data)
    finally:
        server.stop()
        _run("umount", "--lazy", str(data))


class Standby:
    """A copy of the environment's own server, which follows it until it is promoted."""

    def __init__(self, environment: Environment) -> None:
        self._account = server_account()
        self._binaries = programs_for(self._account, directory=environment.server.directory)
        self._data = environment.directory / "standby"
        self._environment = environment
        self.url = f"postgresql+psycopg://postgres@/postgres?host={quote(str(self._data))}"

    def start(self) -> None:
        """Copy the server, which has to stop for it, and follow it; its commits wait for us."""
        server = self._environment.server
        # A standby with less room than the server it follows does not start.
        rooms = ("max_connections", "max_prepared_transactions")
        self._no_fewer = {name: self._environment.scalar(f"SHOW {name}") for name in rooms}
        server.stop()
        shutil.rmtree(self._data, ignore_errors=True)
        _run("cp", "-a", str(server.directory / "data"), str(self._data))
        signal_file = _written(self._data / "standby.signal", "")
        os.chown(signal_file, self._account.uid, self._account.gid)
        follow = f"primary_conninfo = 'host={server.directory / 'data'} user=postgres'\n"
        with (self._data / "postgresql.auto.conf").open("a") as settings:
            settings.write(follow)
        server.start()
        self._process = subprocess.Popen(
            [str(self._binaries / "postgres"), "-D", str(self._data), *self._options()],
            stdin=subprocess.DEVNULL,
            stdout=(self._environment.directory / "standby.log").open("wb"),
            stderr=subprocess.STDOUT,
            cwd="/",
            env=environment(),
            **self._account.process_options,
        )
        self._wait_for_it()

    def _options(self) -> list[str]:
        return [
            f"--unix_socket_directories={self._data}",
            "--listen_addresses=",
            *(f"--{name}={value}" for name, value in self._no_fewer.items()),
        ]

    def _wait_for_it(self) -> None:
        environment = self._environment
        with environment.engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.execute(text("ALTER SYSTEM SET synchronous_standby_names = '*'"))
            connection.execute(text("SELECT pg_reload_conf()"))
        in_step = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        environment.until(lambda: environment.scalar(in_step), what="a standby follows in step")

    def promote(self) -> None:
        engine = create_engine(self.url, poolclass=NullPool)
        with engine.connect() as connection:
            promoted = connection.scalar(text("SELECT pg_promote()"))
        self._environment.expect(bool(promoted), "the standby was not promoted")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)  # a fast shutdown
        self._process.wait()


@contextmanager
def hot_standby(environment: Environment) -> Iterator[Standby]:
    standby = Standby(environment)
    standby.start()
    try:
        yield standby
    finally:
        standby.stop()


def _written(path: Path, words: str) -> Path:
    path.write_text(words)
    return path


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
