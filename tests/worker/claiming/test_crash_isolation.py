"""Suspects: after a crash one job at a time."""

import pytest

from pgqueue.repository.claim import Claimed
from pgqueue.worker.claiming import crash_isolation as module
from pgqueue.worker.claiming.crash_isolation import ALONE_FOR, LONGER, CrashIsolation
from pgqueue.worker.claiming.cursors import START, ClaimCursors

Here = tuple[CrashIsolation, dict[int, object], ClaimCursors]


def job(message_id: int, *, crashes: int = 0) -> Claimed:
    return Claimed(5, "2026", message_id, message_id, "default", "t", "{}", 9, 1, crashes)


@pytest.fixture
def here() -> Here:
    in_flight: dict[int, object] = {1: "runs", 2: "runs"}
    cursors = ClaimCursors(["default"])
    return CrashIsolation(in_flight, cursors), in_flight, cursors


def test_while_a_suspect_runs_no_other_may_come(here: Here) -> None:
    isolation, _, _ = here
    isolation.start([job(2)])
    assert isolation.are_welcome()

    isolation.start([job(1, crashes=1), job(2)])

    assert not isolation.are_welcome()
    assert 0 < isolation.seconds_left() <= ALONE_FOR


def test_the_next_may_come_when_it_has_been_settled(here: Here) -> None:
    isolation, in_flight, cursors = here
    isolation.start([job(1, crashes=1)])
    cursors._keys["default", 5] = ("2020", 7)

    del in_flight[1]

    assert isolation.seconds_left() == 0
    assert isolation.are_welcome()
    found = {pair[2:] for pair in cursors.pairs()}
    assert found == {START}, "the others stand behind the cursors"


def test_the_next_may_come_when_it_has_run_for_a_while(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolation, _, _ = here
    monkeypatch.setattr(module, "ALONE_FOR", 0.0)

    isolation.start([job(1, crashes=1)])

    assert isolation.are_welcome()


@pytest.mark.parametrize("crashes", [2, 3, 30_000])
def test_a_suspect_of_several_crashes_is_alone_for_longer(here: Here, crashes: int) -> None:
    isolation, _, _ = here

    isolation.start([job(1, crashes=crashes)])

    at_most = ALONE_FOR * LONGER ** (crashes - 1) if crashes < 30_000 else 2 * 86_400
    assert ALONE_FOR * LONGER ** min(crashes - 2, 7) < isolation.seconds_left() <= at_most
