"""Durations, counted in buckets of which each is twice as wide as the one before."""

from collections.abc import Sequence
from datetime import timedelta

MOST_BUCKETS = 26
"""The last bucket begins at 2**24 milliseconds, which are 4 hours and 40 minutes."""


def bucket_of(seconds: float) -> int:
    """The bucket of a duration: 0 below a millisecond, 1 below two, 2 below four, and so on."""
    return min(int(seconds * 1000).bit_length(), MOST_BUCKETS - 1) if seconds > 0 else 0


def least(bucket: int) -> timedelta:
    """The shortest duration of a bucket."""
    return timedelta(milliseconds=2.0 ** (bucket - 1) if bucket else 0)


def about(counts: Sequence[int]) -> timedelta:
    """About the sum of the counted durations: each is taken for the middle of its bucket."""
    middles = (0.5 if bucket == 0 else 1.5 * 2.0 ** (bucket - 1) for bucket in range(len(counts)))
    total = sum(count * middle for count, middle in zip(counts, middles, strict=True))
    return timedelta(milliseconds=total)


def percentile(counts: Sequence[int], share: float) -> timedelta | None:
    """The duration below which a share of the counted ones lie; None if there are none.

    Assumes that the durations in a bucket are spread evenly on a logarithmic scale, so the result
    is at most twice, and at least half, of the exact one.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    below = 0
    for bucket, count in enumerate(counts):
        if count and below + count >= wanted:
            part = (wanted - below) / count
            milliseconds = 2.0 ** (bucket - 1 + part) if bucket else part
            return timedelta(milliseconds=milliseconds)
        below += count
    raise AssertionError(f"{share} is not a share")
