"""Prefetch: as much ahead as the handlers' speed asks for, and never what would wait long."""

import pytest

from pgqueue.worker.claiming.prefetch import (
    CALM_AFTER,
    HORIZON,
    MOST_AHEAD,
    STALE,
    TOO_OLD,
    URGENT_SHARE,
    Prefetch,
)


def fast(*, slots: int = 10, jobs_per_second: float = 100_000) -> Prefetch:
    """One whose slots have run so many jobs in a second, again and again."""
    prefetch = Prefetch(slots=slots)
    for _ in range(30):
        prefetch.ran(int(jobs_per_second), busy=float(slots))
    return prefetch


def test_nothing_is_claimed_ahead_before_any_job_has_ended() -> None:
    prefetch = Prefetch(slots=10)

    prefetch.ran_dry()

    assert prefetch.ahead == 0


def test_it_begins_at_the_slots_and_doubles_whenever_it_runs_dry() -> None:
    prefetch, seen = fast(), []

    for _ in range(8):
        prefetch.ran_dry()
        seen.append(prefetch.ahead)

    assert seen == [10, 20, 40, 80, 160, 320, 640, MOST_AHEAD]


def test_it_holds_no_more_than_the_handlers_do_within_the_horizon() -> None:
    prefetch = fast(jobs_per_second=5_000)

    for _ in range(10):
        prefetch.ran_dry()

    assert prefetch.ahead == pytest.approx(5_000 * HORIZON, abs=1)


def test_handlers_that_take_their_time_have_none_ahead() -> None:
    prefetch = fast(jobs_per_second=20)

    prefetch.ran_dry()

    assert prefetch.ahead == 0


def test_it_is_halved_when_what_it_holds_waits_too_long_and_only_then() -> None:
    prefetch = fast()
    for _ in range(4):
        prefetch.ran_dry()

    prefetch.oldest_waits(TOO_OLD)
    kept = prefetch.ahead
    prefetch.oldest_waits(TOO_OLD + 0.001)

    assert (kept, prefetch.ahead) == (80, 40)


def test_when_the_handlers_slow_down_so_does_it() -> None:
    prefetch = fast()
    for _ in range(10):
        prefetch.ran_dry()

    for _ in range(30):
        prefetch.ran(1, busy=10.0)
    prefetch.ran_dry()

    assert prefetch.ahead == 0


def test_a_time_in_which_no_slot_was_busy_says_nothing() -> None:
    prefetch = fast()

    prefetch.ran(0, busy=0.0)
    prefetch.ran_dry()

    assert prefetch.ahead == 10


def test_nothing_is_left_ahead_when_what_it_held_had_to_be_given_back() -> None:
    prefetch = fast()
    for _ in range(4):
        prefetch.ran_dry()

    prefetch.oldest_waits(STALE + 0.001)

    assert prefetch.ahead == 0


def full(prefetch: Prefetch) -> Prefetch:
    for _ in range(10):
        prefetch.ran_dry()
    return prefetch


@pytest.mark.parametrize(
    "claims", [[(5, 5), (0, 5)], [(5, 5), (0, 0)]], ids=["with others", "before others"]
)
def test_an_urgent_job_has_the_next_claims_be_smaller_at_once(
    claims: list[tuple[int, int]],
) -> None:
    prefetch = full(fast())

    for first, last in claims:
        prefetch.brought(first=first, last=last)

    assert prefetch.ahead == MOST_AHEAD // URGENT_SHARE
    assert full(prefetch).ahead == MOST_AHEAD // URGENT_SHARE


def test_they_grow_again_when_no_urgent_one_has_come_for_long() -> None:
    prefetch = fast()
    prefetch.brought(first=5, last=5)
    prefetch.brought(first=0, last=5)

    for _ in range(CALM_AFTER - 1):
        prefetch.brought(first=5, last=5)
    still = full(prefetch).ahead
    prefetch.brought(first=5, last=5)

    assert (still, full(prefetch).ahead) == (MOST_AHEAD // URGENT_SHARE, MOST_AHEAD)


def test_a_backlog_that_is_drained_by_priority_has_no_urgent_jobs() -> None:
    prefetch = full(fast())

    for first, last in [(0, 0), (0, 5), (5, 5), (5, 9), (9, 9)]:
        prefetch.brought(first=first, last=last)

    assert prefetch.ahead == MOST_AHEAD
