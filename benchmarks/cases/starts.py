"""How long something needs until it works."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.case import Bench, Finding, Size, case
from benchmarks.systems import PGQUEUE


@case(smoke=Size(jobs=5), usual=Size(jobs=200, turns=3))
def cold_children(bench: Bench, size: Size) -> Finding:
    """Jobs of ``executor="process"``, one after the other, each in a child process of its own."""
    finding = Finding()
    with bench.arena(PGQUEUE.given("children", handler="process", concurrency=1)) as arena:
        rates = [arena.drain(size.jobs) for _ in range(size.turns)]
    finding.add("a job", [1000 / rate for rate in rates], "ms")
    return finding


HELP = [sys.executable, "-m", "pgqueue", "--help"]


@case(smoke=Size(turns=1), usual=Size(turns=15))
def command_help(bench: Bench, size: Size) -> Finding:
    """``pgqueue --help``, from the start of Python to its end, with bytecode as pip writes it."""
    finding = Finding()
    starts = [_start(HELP) for _ in range(size.turns + 1)][1:]  # the first may write the bytecode
    finding.add("a call", [seconds * 1000 for seconds, _ in starts], "ms")
    processor = finding.add("its processor time", [used * 1000 for _, used in starts], "ms")
    finding.bound(processor, at_most=80)
    code = "import sys; from pgqueue.cli import main; main(['--help'], standalone_mode=False)"
    code = f"{code}; print(len(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    finding.add("its modules", [float(ended.stdout.split()[-1])], "")
    return finding


def _start(command: Sequence[str]) -> tuple[float, float]:
    """The seconds until a process has ended, and those of its processor time."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, used
