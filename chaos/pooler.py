"""PgBouncer in front of the environment's own server, in transaction pooling."""

from __future__ import annotations

import os
import socket
import subprocess
from types import TracebackType
from typing import Self
from urllib.parse import quote

from sqlalchemy import make_url

from chaos.environment import Environment
from pgqueue.embedded.programs import environment as server_environment
from pgqueue.embedded.programs import server_account

SETTINGS = """
[databases]
* = host={server} port=5432 user=postgres

[pgbouncer]
pool_mode = transaction
server_reset_query = DISCARD ALL
server_reset_query_always = 1
auth_type = any
listen_addr =
listen_port = 6432
unix_socket_dir = {folder}
max_client_conn = 1000
default_pool_size = 40
ignore_startup_parameters = extra_float_digits,options
"""


class Pooler:
    """Runs as the account that runs the server, because it refuses root."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._folder = environment.directory / "pooler"
        self.url = f"postgresql+psycopg://postgres@/postgres?host={quote(str(self._folder))}"
        self.url += "&port=6432"

    def __enter__(self) -> Self:
        account = server_account()
        self._folder.mkdir()
        os.chown(self._folder, account.uid, account.gid)
        server = make_url(self._environment.url).query["host"]
        file = self._folder / "pgbouncer.ini"
        file.write_text(SETTINGS.format(server=server, folder=self._folder))
        os.chown(file, account.uid, account.gid)
        self._process = subprocess.Popen(
            ["pgbouncer", "--quiet", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=(self._folder / "log").open("wb"),
            stderr=subprocess.STDOUT,
            cwd="/",
            env={
                **server_environment(),
                "PATH": "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin",
            },
            **account.process_options,
        )
        self._environment.until(self._is_ready, what="PgBouncer listens")
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def _is_ready(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self._folder / ".s.PGSQL.6432")) == 0
