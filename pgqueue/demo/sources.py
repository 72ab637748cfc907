"""Which files the demo indexes: the standard library, what is installed, and three broken ones."""

import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

BROKEN = Path(__file__).with_name("broken")

OTHERS = {"site-packages", "dist-packages", "__pycache__"}
"""Folders inside the standard library's that do not belong to it."""


def python_files(*, limit: int, seed: int) -> list[str]:
    """The paths to index: the broken files, and a sample of all others."""
    broken = [str(path) for path in sorted(BROKEN.glob("*.broken"))]
    found = sorted({path for root in roots() for path in _below(root)})
    random.Random(seed).shuffle(found)  # noqa: S311  # not a secret
    return broken + found[: limit - len(broken)]


def roots() -> list[str]:
    """The folders modules are imported from, the innermost first."""
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return sorted(found, key=len, reverse=True)


def short_name(path: str) -> str:
    """A path as an import would begin it: below the folder that holds it."""
    for root in (str(BROKEN.parent), *roots()):
        if path.startswith(f"{root}{os.sep}"):
            return path[len(root) + 1 :]
    return path


def _below(root: str) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in OTHERS]
        for name in names:
            path = os.path.join(folder, name)
            # A name that is no UTF-8 cannot be an argument of a job.
            if name.endswith(".py") and path.isprintable():
                yield path
