"""The inner loop of a developer stays short."""

import os
import resource
import subprocess
from pathlib import Path

import pytest
from worker_rig import promised

ROOT = Path(__file__).parents[1]
CORES = 2


@pytest.mark.journey
@pytest.mark.timed
def test_the_quick_checks_take_twenty_seconds_on_two_cores() -> None:
    """In processor time, so that what else this machine does is not counted."""
    outer = ("PYTEST_", "MAKE", "MFLAGS", "PGQUEUE_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)

    subprocess.run(["make", "quick"], cwd=ROOT, env=variables, check=True)

    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert used / CORES < promised(20)
