"""Aging: the order of the pairs, by how long their first jobs have waited."""

from datetime import timedelta

import pytest
from test_cursors import row

from pgqueue.repository.claim import Ages, ClaimCursor
from pgqueue.worker.claiming.aging import Aging
from pgqueue.worker.claiming.cursors import START, ClaimCursors
from pgqueue.worker.claiming.shares import Shares

PERIODS_AGO = [f"2026-01-01 11:{50 - count:02}:00+00" for count in range(9)]
"""One minute each; now is 11:51."""
NEW = "2026-01-01 11:50:30+00"


def waiting(periods: int) -> str:
    """When a job was due that has waited for some periods and a half."""
    return f"2026-01-01 11:{50 - periods:02}:30+00"


def aging(oldest: dict[int, str]) -> Aging:
    learned = Aging(timedelta(minutes=1))
    learned.learn(Ages({("a", priority): at for priority, at in oldest.items()}, PERIODS_AGO))
    return learned


def order(aged: Aging, *, passed: dict[int, str] | None = None) -> list[int]:
    """The priorities in the order of the claim; ``passed``: how far they have been claimed."""
    keys = {priority: (run_at, 1) for priority, run_at in (passed or {}).items()}
    pairs = [ClaimCursor("a", priority, *keys.get(priority, START)) for priority in range(10)]
    return [pair.priority for pair in aged.in_order(pairs)]


def test_without_old_jobs_the_order_is_that_of_the_priorities() -> None:
    assert order(aging({})) == list(range(10))
    assert order(aging({0: NEW, 5: NEW, 9: NEW})) == list(range(10))


@pytest.mark.parametrize("periods", [1, 2, 3])
def test_each_period_of_waiting_counts_as_one_priority(periods: int) -> None:
    before = order(aging({9: waiting(periods)}))

    assert before.index(9) == 9 - periods + 1  # behind the pair that it is equal to


def test_no_job_counts_as_more_urgent_than_the_most_urgent() -> None:
    assert order(aging({1: waiting(9), 9: waiting(9)}))[:3] == [0, 1, 9]


def test_of_equal_pairs_the_one_served_longest_ago_is_first() -> None:
    aged = aging({0: waiting(9), 9: waiting(9)})
    first = []
    for number in range(6):
        first.append(order(aged)[0])
        aged.took([row(waiting(9), number, priority=first[-1])])

    assert first == [0, 9, 0, 9, 0, 9]


def test_a_pair_whose_old_jobs_have_been_claimed_since_is_in_its_place_again() -> None:
    aged = aging({0: NEW, 9: waiting(9)})

    assert order(aged, passed={9: waiting(9)})[:2] == [0, 9]
    assert order(aged, passed={9: NEW}) == list(range(10))


def test_with_weights_the_order_within_a_queue_is_that_of_the_ages() -> None:
    weights = {"a": 1, "b": 3}
    cursors = ClaimCursors(
        list(weights), shares=Shares(weights), aging=aging({0: NEW, 9: waiting(9)})
    )

    pairs = cursors.pairs()

    assert [pair.queue for pair in pairs] == ["b"] * 10 + ["a"] * 10
    assert [pair.priority for pair in pairs[10:13]] == [0, 9, 1]
