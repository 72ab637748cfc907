"""The account that runs the server: the current user, or another account if the user is root."""

# ruff: noqa: S603 - starting programs is what this module is for

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgqueue.errors import PgQueueError

if sys.platform != "win32":
    import pwd


class PostgresFailed(PgQueueError, RuntimeError):
    """A command to the private PostgreSQL has failed."""


@dataclass(frozen=True)
class Account:
    """The account that runs PostgreSQL's programs."""

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

    def give(self, path: Path) -> None:
        """Make this account the owner of a path that we have created."""
        if self.is_lent:
            os.chown(path, self.uid, self.gid)

    def let_in(self, folder: Path) -> None:
        """Let this account traverse a folder that we have created and own."""
        if self.is_lent:
            folder.chmod(0o711)

    def run(self, command: Sequence[str]) -> str:
        """Run a program to its end and return what it printed."""
        try:
            ended: subprocess.CompletedProcess[str] = subprocess.run(
                command,
                capture_output=True,
                text=True,
                cwd="/",
                env=environment(),
                **self.process_options,
            )
        except OSError as error:
            raise PostgresFailed(f"{self.name!r} cannot run {command[0]}: {error}") from error
        if ended.returncode != 0:
            raise PostgresFailed(f"{command[0]}, run by {self.name!r}: {ended.stderr.strip()}")
        return ended.stdout


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
