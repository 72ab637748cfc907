"""Damaged rows and wrong handlers, each put in by its own way: nothing is lost or stuck."""

import sys

import pytest
from bad_input_cases import ENDINGS, ROWS
from bad_input_jobs import UNKEPT
from bad_input_kinds import Damaged, Ending
from bad_input_runs import Seen, run_damaged, run_endings
from sqlalchemy import Engine

from pgqueue import JobStatus, PgQueue

pytestmark = pytest.mark.journey

LARGEST_ERROR = 100_000
LONGEST_WAIT = 60


def test_a_damaged_row_costs_its_own_job_alone(engine: Engine) -> None:
    for case, seen in run_damaged(PgQueue(engine), ROWS).items():
        cost_its_own_job_alone(case, seen)


def test_whatever_a_handler_does_wrong_its_job_ends_with_a_reason(engine: Engine) -> None:
    for case, seen in run_endings(PgQueue(engine), ENDINGS).items():
        ended_with_a_reason(case, seen)


def cost_its_own_job_alone(case: Damaged, seen: Seen) -> None:
    assert case.refused in seen.refused
    assert bool(case.refused) == bool(seen.refused), seen.refused
    assert seen.broken == case.found
    assert len(seen.jobs) == case.jobs
    for job in seen.jobs:
        assert (job.outcome, job.result) == (case.outcome, case.result)
        assert case.said in (job.last_error or "")
        assert job.last_error or job.outcome != "failed", "a failure has words"
        assert job.outcome or job.status is JobStatus.PENDING
    assert "antigravity" not in sys.modules, "a task is never imported by its name"
    nothing_else_is_lost(seen)


def ended_with_a_reason(case: Ending, seen: Seen) -> None:
    [job] = seen.jobs

    assert job.outcome == case.outcome
    if case.outcome is None:
        assert job.status is JobStatus.PENDING
        assert job.seconds_to_wait < LONGEST_WAIT
    else:
        assert job.attempts == case.attempts
    if case.result is UNKEPT:
        assert UNKEPT in job.result
    else:
        assert job.result == case.result
    for attempt in seen.attempts:
        told = f"{attempt.error_type}: {attempt.error}\n{attempt.traceback}"
        assert case.said in told
        assert not case.hidden or case.hidden not in told
        assert len(told) < LARGEST_ERROR
    assert bool(seen.attempts) == bool(case.said)
    assert case.logged in seen.log
    nothing_else_is_lost(seen)


def nothing_else_is_lost(seen: Seen) -> None:
    """The good job beside it has run, and nothing is left but the messages of jobs that wait."""
    waiting = [job for job in seen.jobs if job.outcome is None]

    assert seen.neighbour == "succeeded"
    assert (seen.messages, seen.leases) == (len(waiting), 0)
    assert seen.still_broken == set()
