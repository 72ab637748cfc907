"""The buffer knows how long the oldest of its jobs has waited, and gives out none at the end."""

import time

import pytest

from pgqueue.repository.claim import Claimed
from pgqueue.worker.buffer import JobBuffer


def claimed(number: int) -> Claimed:
    return Claimed(5, f"2026-01-01 00:00:{number:02}+00", number, number, "q", "t", "{}", 1, 1, 0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_longest_wait_is_that_of_what_was_not_taken(clock: list[float]) -> None:
    buffer = JobBuffer()
    assert buffer.longest_wait() == 0

    buffer.put([claimed(1), claimed(2)])
    clock[0] += 1
    buffer.put([claimed(3)])
    clock[0] += 1
    assert buffer.longest_wait() == 2

    buffer.take()
    assert buffer.longest_wait() == 2, "one of the first is still there"
    buffer.take()
    assert buffer.longest_wait() == 1
    buffer.drain()
    assert buffer.longest_wait() == 0


def test_it_forgets_when_what_was_taken_had_been_laid_out() -> None:
    buffer = JobBuffer()
    for number in range(50):
        buffer.put([claimed(number)])
        buffer.take()
    assert len(buffer._fills) == 1


def test_a_closed_buffer_gives_out_no_job() -> None:
    """A job that has not started when its worker stops is released."""
    buffer = JobBuffer()
    buffer.put([claimed(1)])

    buffer.close()

    assert buffer.take() is None
    assert buffer.take_now() is None
    assert buffer.drain() == [claimed(1)]
