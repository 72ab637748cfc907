"""The workbench knows how long the oldest of what lies on it has waited, and who has left."""

import time

import pytest

from pgqueue.outcomes import Succeeded
from pgqueue.repository import Claimed, Settled
from pgqueue.worker.workbench import Workbench


def claimed(number: int) -> Claimed:
    return Claimed(5, f"2026-01-01 00:00:{number:02}+00", number, number, "q", "t", "{}", 1, 1, 0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_longest_wait_is_that_of_what_was_not_taken(clock: list[float]) -> None:
    bench = Workbench()
    assert bench.longest_wait() == 0

    bench.put([claimed(1), claimed(2)])
    clock[0] += 1
    bench.put([claimed(3)])
    clock[0] += 1
    assert bench.longest_wait() == 2

    bench.take()
    assert bench.longest_wait() == 2, "one of the first is still there"
    bench.take()
    assert bench.longest_wait() == 1
    bench.drain()
    assert bench.longest_wait() == 0


def test_what_is_held_back_goes_to_no_slot_until_it_is_let_go() -> None:
    bench = Workbench()
    urgent, lying, brought = (claimed(n)._replace(priority=n) for n in (1, 5, 9))
    bench.put([lying])

    bench.put_behind([urgent, brought], priority=5)

    assert (bench.take_now(), bench.take_now()) == (urgent, None)
    bench.let_go()
    assert (bench.take_now(), bench.take_now()) == (lying, brought)
    assert set(bench.in_flight) == {1, 5, 9}


def test_what_is_held_back_waits_from_when_it_came_and_is_taken_back_with_the_rest(
    clock: list[float],
) -> None:
    bench = Workbench()
    bench.put([claimed(1)])
    clock[0] += 1

    bench.put_behind([claimed(2)], priority=5)

    assert bench.longest_wait() == 1
    assert {each.message_id for each in bench.drain()} == {1, 2}
    assert bench.longest_wait() == 0


def test_it_forgets_when_what_was_taken_had_been_laid_out() -> None:
    bench = Workbench()
    for number in range(50):
        bench.put([claimed(number)])
        bench.take()
    assert len(bench._fills) == 1


@pytest.mark.parametrize(
    "how", ["all went well", "one was too late", "settled already", "forgotten"]
)
@pytest.mark.parametrize("crashes", [0, 1])
def test_whoever_claims_is_woken_when_a_suspect_has_left(how: str, crashes: int) -> None:
    bench = Workbench()
    woken: list[str] = []
    bench.wake = lambda: woken.append(how)
    suspect = claimed(1)._replace(crashes=crashes)
    bench.put([suspect, claimed(2)])

    if how == "all went well":
        bench.settled([(suspect, Succeeded()), (claimed(2), Succeeded())], None)
    elif how == "one was too late":
        bench.settled([(suspect, Succeeded())], [Settled(2, None)])
    elif how == "settled already":
        bench.settled_already(suspect, "succeeded")
    else:
        bench.forget(suspect.message_id)

    assert woken == [how] * crashes
    assert suspect.message_id not in bench.in_flight
