"""The workbench knows how long the oldest of what lies on it has waited, and who has left."""

import time

import pytest

from pgqueue.outcomes import Succeeded
from pgqueue.repository.claim import Claimed
from pgqueue.repository.settle import Settled
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


def test_what_is_held_back_goes_to_no_slot_until_it_is_let_go() -> None:
    buffer = JobBuffer()
    urgent, lying, brought = (claimed(n)._replace(priority=n) for n in (1, 5, 9))
    buffer.put([lying])

    buffer.put_behind([urgent, brought], priority=5)

    assert (buffer.take_now(), buffer.take_now()) == (urgent, None)
    buffer.let_go()
    assert (buffer.take_now(), buffer.take_now()) == (lying, brought)
    assert set(buffer.in_flight) == {1, 5, 9}


def test_what_was_claimed_for_a_free_slot_is_taken_before_what_was_held_back() -> None:
    buffer = JobBuffer()
    held, for_a_slot = claimed(1), claimed(2)
    buffer.put_behind([held], priority=5)
    buffer.put([for_a_slot])

    assert not buffer.let_go()
    assert (buffer.take_now(), buffer.take_now()) == (for_a_slot, None)
    assert buffer.let_go()
    assert buffer.take_now() == held


def test_what_is_held_back_waits_from_when_it_came_and_is_taken_back_with_the_rest(
    clock: list[float],
) -> None:
    buffer = JobBuffer()
    buffer.put([claimed(1)])
    clock[0] += 1

    buffer.put_behind([claimed(2)], priority=5)

    assert buffer.longest_wait() == 1
    assert {each.message_id for each in buffer.drain()} == {1, 2}
    assert buffer.longest_wait() == 0


def test_it_forgets_when_what_was_taken_had_been_laid_out() -> None:
    buffer = JobBuffer()
    for number in range(50):
        buffer.put([claimed(number)])
        buffer.take()
    assert len(buffer._fills) == 1


@pytest.mark.parametrize("how", ["all went well", "one was too late", "discarded"])
@pytest.mark.parametrize("crashes", [0, 1])
def test_whoever_claims_is_woken_when_a_suspect_has_left(how: str, crashes: int) -> None:
    buffer = JobBuffer()
    woken: list[str] = []
    buffer.wake = lambda: woken.append(how)
    suspect = claimed(1)._replace(crashes=crashes)
    buffer.put([suspect, claimed(2)])

    if how == "all went well":
        buffer.settled([(suspect, Succeeded()), (claimed(2), Succeeded())], None)
    elif how == "one was too late":
        buffer.settled([(suspect, Succeeded())], [Settled(2, None)])
    else:
        buffer.discarded(suspect, "stale")

    assert woken == [how] * crashes
    assert suspect.message_id not in buffer.in_flight
