"""How long something needs until it works."""

from __future__ import annotations

import subprocess
import sys
import time

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


@case(smoke=Size(jobs=1), usual=Size(jobs=10, turns=3))
def command_help(bench: Bench, size: Size) -> Finding:
    """``pgqueue --help``, from the start of Python to its end."""
    finding = Finding()
    finding.add("a call", [_seconds(size.jobs) * 1000 for _ in range(size.turns)], "ms")
    return finding


def _seconds(calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        subprocess.run([sys.executable, "-m", "pgqueue", "--help"], check=True, capture_output=True)
    return (time.perf_counter() - began) / calls
