"""What a worker counts in memory is bounded, and what is measured by chance is not biased."""

import uuid
from threading import Event

import pytest

from pgqueue import PgQueue
from pgqueue.events import AttemptOutcome
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.outcomes import ErrorReport, Failed, Outcome, Released, Retried, Succeeded
from pgqueue.repository.claim import Claimed
from pgqueue.worker.attempt_counts import (
    MOST_COUNTERS,
    MOST_ERRORS,
    MOST_MEASURED,
    MOST_TASKS,
    OTHER,
    AttemptCounts,
    attempts_to_skip,
)
from pgqueue.worker.server_clock import ServerClock

MOMENT = "2026-01-01 00:00:00+00"


@pytest.fixture
def clock() -> ServerClock:
    return ServerClock()


@pytest.fixture
def counts(clock: ServerClock) -> AttemptCounts:
    return AttemptCounts(clock)


def claimed(task: str = "t") -> Claimed:
    return Claimed(5, MOMENT, 1, 1, "q", task, "{}", 1, 1, 0)


def attempt() -> RunningAttempt:
    task = PgQueue().task(name="t")(lambda: None)
    run = RunningAttempt(claimed(), task, worker_id=uuid.uuid4(), stopping=Event())
    run.finish()
    return run


def end(counts: AttemptCounts, outcome: Outcome, recorded: str, task: str = "t") -> None:
    counts.ended(claimed(task), outcome, AttemptOutcome(recorded))


def failed(number: int) -> Failed:
    return Failed(ErrorReport(f"Error{number}", "no", ""))


@pytest.mark.parametrize(("number", "one_in"), [(1, 1), (MOST_MEASURED, 1), (1000, 125)])
def test_of_many_attempts_some_are_measured_and_each_counts_for_several(
    counts: AttemptCounts, number: int, one_in: int
) -> None:
    counts.claimed([claimed()] * number)

    counts.ran(attempt(), None)

    assert counts.take().minutes()[0]["ran"][0] == one_in


@pytest.mark.parametrize("one_in", [1, 2, 125])
def test_one_of_so_many_attempts_is_measured_on_average(one_in: int) -> None:
    measured = 20_000

    skipped = sum(attempts_to_skip(one_in) for _ in range(measured))

    # Seven standard deviations: fails once in 10^11 runs.
    bound = 7 * one_in / measured**0.5
    assert 1 + skipped / measured == pytest.approx(one_in, abs=bound if one_in > 1 else 0)


def test_an_attempt_whose_handler_was_not_called_has_no_duration(counts: AttemptCounts) -> None:
    counts.ran(attempt(), Released())
    end(counts, Released(), "released")

    assert counts.take().minutes() == []


def test_durations_are_measured_by_the_clock_of_the_database(
    clock: ServerClock, counts: AttemptCounts
) -> None:
    run = attempt()
    clock.read("2026-01-01 00:00:03+00", run.started_at)

    counts.ran(run, None)

    [row] = counts.take().minutes()
    assert (len(row["waited"]), row["waited"][-1]) == (13, 1)  # 2048 to 4095 milliseconds
    assert row["minute"] == 1767225600 // 60


def test_tasks_beyond_the_most_are_counted_together(counts: AttemptCounts) -> None:
    counts.succeeded(f"task{n}" for n in range(MOST_TASKS + 3))

    rows = {row["task"]: row["succeeded"] for row in counts.take().minutes()}

    assert len(rows) == MOST_TASKS + 1
    assert rows[OTHER] == 3


def test_errors_beyond_the_most_are_counted_together(counts: AttemptCounts) -> None:
    for number in range(MOST_ERRORS + 3):
        end(counts, failed(number), "failed")

    rows = counts.take().groups()

    assert len(rows) == MOST_ERRORS + 1
    assert (rows[-1]["error_type"], rows[-1]["task"], rows[-1]["attempts"]) == (OTHER, OTHER, 3)


def test_numbers_that_cannot_be_written_are_bounded(counts: AttemptCounts) -> None:
    counts.succeeded(["t"])
    for number in range(MOST_COUNTERS):
        counts._counted.numbers[number, "t", "failed", 0] += 1
        counts._counted.started[number, "q"] += 1

    counts.succeeded(["t", "new"])
    counts.claimed([claimed()])

    taken = counts.take()
    assert len(taken.numbers) == MOST_COUNTERS + 1
    assert len(taken.started) == MOST_COUNTERS


def test_what_is_given_back_is_added_to_what_was_counted_meanwhile(counts: AttemptCounts) -> None:
    counts.succeeded(["t", "t"])
    end(counts, failed(1), "failed")
    counts.claimed([claimed()])
    taken = counts.take()
    counts.succeeded(["t"])
    end(counts, failed(1), "failed")
    counts.claimed([claimed()])
    counts.give_back(taken)

    again = counts.take()

    assert sum(row["started"] for row in again.queues()) == 2
    assert sum(row["succeeded"] for row in again.minutes()) == 3
    assert [row["attempts"] for row in again.groups()] == [2]


def test_an_error_counts_if_its_attempt_has_failed(counts: AttemptCounts) -> None:
    retried = Retried(None, ErrorReport("ValueError", "no", ""))
    end(counts, retried, "retried")
    end(counts, retried, "cancelled")  # a cancel was requested meanwhile
    end(counts, Succeeded(), "succeeded")

    taken = counts.take()

    assert [row["attempts"] for row in taken.groups()] == [1]
    assert sum(row["cancelled"] for row in taken.minutes()) == 1
