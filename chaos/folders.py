"""Folders for the servers of scenarios and tests, which are removed if their process is killed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "pgqueue-run-"


@contextmanager
def server_folder(parent: str | None = None) -> Iterator[Path]:
    """A folder, gone afterwards, that the account which runs the server of root can enter.

    Removes the folders of killed processes first.  PostgreSQL ends within a minute when its folder
    is gone.
    """
    place = Path(parent or tempfile.gettempdir())
    for folder in place.glob(f"{PREFIX}*"):
        if not _is_running(int(folder.name.split("-")[2])):
            shutil.rmtree(folder, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
    path.chmod(0o711)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a process of another user
    return True
