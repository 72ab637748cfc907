"""Shares: which queue a claim serves first, and with how many jobs."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue.worker.claiming.shares import Shares

WEIGHTS = st.dictionaries(
    st.sampled_from("abcdefgh"), st.integers(min_value=1, max_value=1000), min_size=1
)


def fill(shares: Shares, jobs: Counter[str], queues: list[str], room: int) -> Counter[str]:
    """Claim until nothing is left or the room is full; takes from ``jobs``."""
    taken: Counter[str] = Counter()
    while room:
        limit = shares.turn(queues, room)
        order, claim = shares.order(queues), Counter[str]()
        assert 1 <= limit <= room
        for queue in order:
            claim[queue] = min(limit - claim.total(), jobs[queue])
        shares.took(order, claim, is_full=claim.total() == limit)
        jobs.subtract(claim)
        taken += claim
        room -= claim.total()
        if claim.total() < limit:
            break
    return taken


def plenty(weights: dict[str, int]) -> Counter[str]:
    return Counter(dict.fromkeys(weights, 10**9))


def assert_in_proportion(weights: dict[str, int], taken: Counter[str], *, within: float) -> None:
    total = sum(weights.values())
    for queue, weight in weights.items():
        assert abs(taken[queue] - taken.total() * weight / total) < within


class TestWhileAllQueuesHaveJobs:
    @given(WEIGHTS, st.integers(min_value=1, max_value=200))
    def test_one_by_one_each_gets_its_share_within_one_job(
        self, weights: dict[str, int], claims: int
    ) -> None:
        shares, jobs, taken = Shares(weights), plenty(weights), Counter[str]()

        for _ in range(claims):
            taken += fill(shares, jobs, list(weights), 1)
            assert_in_proportion(weights, taken, within=1 + 1e-6)

    @given(WEIGHTS, st.lists(st.integers(min_value=1, max_value=1000), max_size=30))
    def test_whenever_the_room_is_full_each_has_its_share_within_one_job(
        self, weights: dict[str, int], rooms: list[int]
    ) -> None:
        shares, jobs, taken = Shares(weights), plenty(weights), Counter[str]()

        for room in rooms:
            taken += fill(shares, jobs, list(weights), room)
            assert_in_proportion(weights, taken, within=1 + 1e-6)

    def test_three_to_one_is_three_jobs_and_one_in_turn(self) -> None:
        weights = {"mail": 3, "reports": 1}
        shares, jobs = Shares(weights), plenty(weights)

        order = [next(iter(fill(shares, jobs, list(weights), 1))) for _ in range(8)]

        assert sorted(order[:4]) == sorted(order[4:]) == ["mail", "mail", "mail", "reports"]


class TestWhileSomeAreEmpty:
    @given(
        WEIGHTS,
        st.lists(
            st.tuples(
                st.integers(min_value=1, max_value=100),
                st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 200)),
            ),
            max_size=50,
        ),
    )
    def test_a_claim_takes_as_many_jobs_as_there_are(
        self, weights: dict[str, int], steps: list[tuple[int, dict[str, int]]]
    ) -> None:
        shares, jobs = Shares(weights), Counter[str]()

        for room, more in steps:
            jobs.update({queue: count for queue, count in more.items() if queue in weights})
            there = jobs.total()
            assert fill(shares, jobs, list(weights), room).total() == min(room, there)

    @given(
        st.dictionaries(st.sampled_from("bcd"), st.integers(1, 20)),
        st.integers(1, 20),
        st.integers(1, 20),
        st.lists(st.integers(0, 40), min_size=60, max_size=60),
    )
    def test_a_queue_with_jobs_has_its_share_whatever_the_others_do(
        self, others: dict[str, int], weight: int, room: int, arrivals: list[int]
    ) -> None:
        weights = {"a": weight, **others}
        shares, jobs, taken = Shares(weights), Counter(a=10**6), Counter[str]()

        for number, count in enumerate(arrivals):
            jobs[sorted(weights)[number % len(weights)]] += count
            taken += fill(shares, jobs, list(weights), room)

        share = weight / sum(weights.values())
        assert taken["a"] >= share * taken.total() - room - 1

    def test_an_empty_queue_saves_up_no_turns(self) -> None:
        weights = {"mail": 1, "reports": 1}
        shares, jobs = Shares(weights), Counter(mail=10**6)
        for _ in range(100):
            fill(shares, jobs, list(weights), 10)
        jobs["reports"] = 10**6

        assert fill(shares, jobs, list(weights), 20) == {"mail": 10, "reports": 10}

    def test_a_queue_that_is_emptied_by_each_claim_pays_for_more_than_its_share(self) -> None:
        weights = {"mail": 3, "reports": 1}
        shares, jobs, taken = Shares(weights), Counter(mail=10**6), Counter[str]()

        for _ in range(100):
            jobs["reports"] = max(jobs["reports"], 9)
            taken += fill(shares, jobs, list(weights), 10)

        assert taken["mail"] == pytest.approx(750, abs=11)


def test_a_paused_queue_takes_no_part() -> None:
    weights = {"mail": 1, "reports": 1, "default": 2}
    shares, jobs = Shares(weights), plenty(weights)
    fill(shares, jobs, list(weights), 7)

    taken = fill(shares, jobs, ["mail", "default"], 30)

    assert taken == {"mail": 10, "default": 20}
    assert shares.turn([], 5) == 5
