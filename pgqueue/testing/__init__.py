"""Helps an application to test its tasks and what enqueues them.

running      run the jobs of a test in its transaction
assertions   what a test has enqueued, and what waits for what
records      records of steps, after which a handler starts
faults       crashes, timeouts and lost leases on demand
plugin       fixtures and a marker for pytest, the only module that imports pytest
databases    the server of a test run, and its databases
"""

from pgqueue.testing.assertions import assert_blocked, assert_enqueued, enqueued
from pgqueue.testing.faults import crash_job, lose_lease, time_out_job
from pgqueue.testing.records import record_steps
from pgqueue.testing.running import run_jobs

__all__ = [
    "run_jobs",
    "enqueued",
    "assert_enqueued",
    "assert_blocked",
    "record_steps",
    "crash_job",
    "time_out_job",
    "lose_lease",
]
