"""Which pairs a claim reads, if a worker has many."""

import pytest

from pgqueue.worker.claiming.waiting_pairs import LOOK_EVERY, WaitingPairs
from pgqueue.worker.pace import SHARE


@pytest.fixture
def pairs() -> WaitingPairs:
    """After a look: two queues have urgent jobs, one has others, and one has some for later."""
    pairs = WaitingPairs()
    found = [("a", 5, True), ("b", 0, True), ("c", 0, True), ("d", 1, False)]
    pairs.learn(found, began=0.0, ended=0.001)
    return pairs


def first(pairs: WaitingPairs, count: int = 10, paused: tuple[str, ...] = ()) -> str:
    return " ".join(f"{queue}{priority}" for queue, priority in pairs.first(count, paused=paused))


def test_the_urgent_come_first_and_those_of_later_are_left_out(pairs: WaitingPairs) -> None:
    assert first(pairs) == "b0 c0 a5"
    assert first(pairs, 2) == "b0 c0"
    assert pairs.seen(paused=["a"]) == [("b", 0), ("c", 0), ("d", 1)]


def test_a_paused_queue_does_not_fill_the_window(pairs: WaitingPairs) -> None:
    assert first(pairs, 2, paused=("b",)) == "c0 a5"


def test_exhausted_pairs_are_forgotten_until_the_next_look(pairs: WaitingPairs) -> None:
    pairs.forget(("b", 0))
    assert first(pairs) == "c0 a5"

    pairs.learn([("b", 0, True)], began=1.0, ended=1.0)
    assert first(pairs) == "b0"


def test_a_pair_with_more_waits_for_its_next_turn(pairs: WaitingPairs) -> None:
    pairs.end_turn(("b", 0))
    assert first(pairs) == "c0 b0 a5"

    pairs.learn([("b", 0, True), ("c", 0, True), ("e", 0, True)], began=1.0, ended=1.0)
    assert first(pairs) == "c0 b0 e0", "a look changes no turn"


def test_a_sweep_begins_again_with_all_of_the_last_look(pairs: WaitingPairs) -> None:
    pairs.forget(("b", 0))
    pairs.begin_again()

    assert first(pairs) == "c0 b0 a5"


def test_a_look_is_due_from_time_to_time_and_when_nothing_is_left(pairs: WaitingPairs) -> None:
    assert not pairs.is_look_due(LOOK_EVERY - 0.01, paused=())
    assert pairs.is_look_due(LOOK_EVERY, paused=())
    assert pairs.is_look_due(0.01, paused=("a", "b", "c")), "only paused queues are left"

    for pair in (("a", 5), ("b", 0), ("c", 0)):
        pairs.forget(pair)
    assert pairs.is_look_due(0.01, paused=())


def test_looks_that_take_long_are_rare(pairs: WaitingPairs) -> None:
    for began in (0.8, 1.0):
        pairs.learn([("a", 5, True)], began=began, ended=began + 0.1)
    assert not pairs.is_look_due(1.0 + SHARE * 0.09, paused=())
    assert pairs.seconds_left(1.1, paused=()) is None, "there is something to claim"

    pairs.forget(("a", 5))
    assert not pairs.is_look_due(1.15, paused=())
    assert pairs.seconds_left(1.15, paused=()) == pytest.approx(0.05)
    assert pairs.is_look_due(1.21, paused=())
