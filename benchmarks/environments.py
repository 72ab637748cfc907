"""The environments of other queues, for the benchmarks and the contests.

Each queue has one of its own, which both use; none is installed beside pgqueue.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ENVIRONMENTS = Path(__file__).parents[1] / ".peers"


class NotInstalled(Exception):
    """It cannot run on this machine; says what is missing."""


def python_with(requirements: Sequence[str], *, folder: Path) -> Path:
    """The Python of the environment in this folder, made if it is missing, given what it lacks."""
    python = python_in(folder)
    make = [sys.executable, "-m", "venv", str(folder)]
    install = [str(python), "-m", "pip", "install", "--quiet", *requirements]
    _run_once([make, install], requirements, folder)
    return python


def install_for_node(requirements: Sequence[str], *, folder: Path) -> None:
    """Install packages of Node in this folder, if it lacks them."""
    install = [needed("npm"), "install", "--silent", "--no-fund", "--prefix", str(folder)]
    _run_once([[*install, *requirements]], requirements, folder)


def python_in(folder: Path) -> Path:
    return folder / "bin/python"


def version_in(python: Path, name: str) -> str:
    """The version of a distribution that this Python has."""
    script = f"from importlib.metadata import version; print(version({name.lower()!r}))"
    return subprocess.check_output([str(python), "-c", script], text=True).strip()


def needed(program: str) -> str:
    """Where a program is that has to be installed on the machine."""
    found = shutil.which(program)
    if found is None:
        raise NotInstalled(f"{program} is not installed")
    return found


def _run_once(commands: Sequence[Sequence[str]], requirements: Sequence[str], folder: Path) -> None:
    # Written last, so that what was interrupted is begun again; it names what is installed,
    # because the benchmarks and the contests ask for different extras of the same queue.
    marker = folder / ".installed"
    installed = set(marker.read_text().splitlines()) if marker.exists() else set()
    if installed.issuperset(requirements):
        return
    folder.mkdir(parents=True, exist_ok=True)
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            said = (error.stderr or error.stdout).strip()
            raise NotInstalled(said[-300:]) from error
    marker.write_text("\n".join(sorted(installed.union(requirements))))
