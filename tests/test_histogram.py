"""Durations in buckets: which bucket, and how near a percentile comes to the exact one."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from pgqueue.rules.histogram import MOST_BUCKETS, about, bucket_of, percentile


def counted(durations: list[float]) -> list[int]:
    counts = [0] * MOST_BUCKETS
    for seconds in durations:
        counts[bucket_of(seconds)] += 1
    return counts


def test_each_bucket_is_twice_as_wide_as_the_one_before() -> None:
    milliseconds = (-1, 0, 0.9, 1, 1.9, 2, 3.9, 4, 1000, 10**12)

    assert [bucket_of(each / 1000) for each in milliseconds] == [0, 0, 0, 1, 1, 2, 2, 3, 10, 25]


@given(st.lists(st.floats(0.001, 3600), min_size=1), st.sampled_from([0.5, 0.95]))
def test_a_percentile_is_wrong_by_a_factor_of_two_at_most(
    durations: list[float], share: float
) -> None:
    ordered = sorted(durations)
    exact = next(each for n, each in enumerate(ordered, 1) if n >= share * len(ordered))

    found = percentile(counted(durations), share)

    assert found is not None
    assert exact / 2.01 <= found.total_seconds() <= exact * 2.01


@given(st.lists(st.floats(0.001, 3600), min_size=1))
def test_a_sum_is_wrong_by_half_at_most(durations: list[float]) -> None:
    found = about(counted(durations)).total_seconds()

    assert sum(durations) / 1.51 <= found <= sum(durations) * 1.51


def test_without_durations_there_is_no_percentile() -> None:
    assert percentile([], 0.5) is None
    assert percentile([0, 0], 0.5) is None
    assert percentile([4], 0.5) == timedelta(milliseconds=0.5)
