"""Suspects: after a crash one job at a time, until many have done no harm."""

import pytest

from pgqueue.worker.claiming import crash_isolation as module
from pgqueue.worker.claiming.crash_isolation import ALONE_FOR, LONGER, MANY, CrashIsolation
from pgqueue.worker.claiming.cursors import START, ClaimCursors

Here = tuple[CrashIsolation, dict[int, object], ClaimCursors]
CROWD = [(1, 1), (2, 1), (3, 1)]


@pytest.fixture
def here() -> Here:
    in_flight: dict[int, object] = {}
    cursors = ClaimCursors(["default"])
    return CrashIsolation(in_flight, cursors), in_flight, cursors


def test_of_those_a_claim_has_brought_one_starts_and_no_more_come(here: Here) -> None:
    suspects, in_flight, _ = here
    assert suspects.are_welcome()

    assert suspects.admit(CROWD, are_all=True) == 1

    in_flight[1] = "runs"
    assert not suspects.are_welcome()
    assert 0 < suspects.seconds_left() <= ALONE_FOR


def test_the_next_may_come_when_it_has_been_settled(here: Here) -> None:
    suspects, in_flight, cursors = here
    suspects.admit(CROWD, are_all=True)
    in_flight[1] = "runs"
    cursors._keys["default", 5] = ("2020", 7)

    del in_flight[1]

    assert suspects.seconds_left() == 0
    assert suspects.are_welcome()
    found = {pair[2:] for pair in cursors.pairs()}
    assert found == {START}, "those that were passed by stand behind the frontier"


def test_the_next_may_come_when_it_has_been_here_for_a_while(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspects, in_flight, _ = here
    monkeypatch.setattr(module, "ALONE_FOR", 0.0)

    suspects.admit(CROWD, are_all=True)
    in_flight[1] = "runs"

    assert suspects.are_welcome()


@pytest.mark.parametrize("crashes", [2, 3, 30_000])
def test_who_was_there_at_several_crashes_is_alone_for_longer(here: Here, crashes: int) -> None:
    suspects, in_flight, _ = here

    suspects.admit([(1, crashes)], are_all=True)
    in_flight[1] = "runs"

    at_most = ALONE_FOR * LONGER ** (crashes - 1) if crashes < 30_000 else 2 * 86_400
    assert ALONE_FOR * LONGER ** min(crashes - 2, 7) < suspects.seconds_left() <= at_most


def _start_one_by_one(suspects: CrashIsolation, count: int) -> None:
    for message in range(count):
        assert suspects.are_welcome()
        assert suspects.admit([(message, 1), (-1, 1)], are_all=False) == 1
    assert suspects.are_welcome()


def test_after_many_in_a_row_the_others_start_together(here: Here) -> None:
    suspects, _, _ = here
    _start_one_by_one(suspects, MANY - 1)
    suspects.admit([], are_all=False)  # others were first
    _start_one_by_one(suspects, 1)

    assert suspects.admit(CROWD, are_all=False) == 3
    assert suspects.are_welcome()


def test_those_of_the_next_crash_start_one_by_one_again(here: Here) -> None:
    suspects, _, _ = here
    _start_one_by_one(suspects, MANY)
    suspects.admit(CROWD, are_all=True)

    suspects.admit([], are_all=True)

    assert suspects.admit(CROWD, are_all=True) == 1
