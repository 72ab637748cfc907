"""The witness: death is a heartbeat seen unchanged for the whole grace, by oneself."""

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from pgqueue.maintenance import FAST_GRACE, SLOW_GRACE, Witness
from pgqueue.repository import Member

BEAT = datetime(2020, 1, 1, tzinfo=UTC)
FAST, SLOW = FAST_GRACE.total_seconds(), SLOW_GRACE.total_seconds()


def member(id: UUID, *, beats: int = 0, is_locked: bool = False) -> Member:
    return Member(id, BEAT + timedelta(seconds=beats), is_locked)


@pytest.fixture
def worker() -> UUID:
    return uuid4()


def test_nobody_is_dead_at_first_sight_however_old_the_beat(worker: UUID) -> None:
    assert Witness().dead_among([member(worker)], now=10_000.0) == []


@pytest.mark.parametrize(("is_locked", "grace"), [(False, FAST), (True, SLOW)])
def test_a_worker_is_dead_after_its_grace_and_not_before(
    worker: UUID, is_locked: bool, grace: float
) -> None:
    witness, seen = Witness(), member(worker, is_locked=is_locked)
    witness.dead_among([seen], now=100.0)

    assert witness.dead_among([seen], now=100.0 + grace - 0.001) == []
    assert witness.dead_among([seen], now=100.0 + grace) == [seen]


def test_a_lock_that_is_lost_makes_the_grace_short_at_once(worker: UUID) -> None:
    witness = Witness()
    witness.dead_among([member(worker, is_locked=True)], now=0.0)
    assert witness.dead_among([member(worker, is_locked=True)], now=FAST) == []

    unlocked = member(worker)

    assert witness.dead_among([unlocked], now=FAST) == [unlocked]


def test_a_beat_begins_the_grace_again(worker: UUID) -> None:
    witness = Witness()
    witness.dead_among([member(worker)], now=0.0)
    witness.dead_among([member(worker, beats=1)], now=FAST - 0.1)

    assert witness.dead_among([member(worker, beats=1)], now=FAST + 1) == []
    assert witness.dead_among([member(worker, beats=1)], now=2 * FAST) != []


def test_a_beat_that_goes_back_is_a_beat(worker: UUID) -> None:
    witness = Witness()
    witness.dead_among([member(worker, beats=5)], now=0.0)

    assert witness.dead_among([member(worker, beats=4)], now=FAST) == []


def test_a_new_witness_has_seen_nothing(worker: UUID) -> None:
    old = Witness()
    old.dead_among([member(worker)], now=0.0)

    assert Witness().dead_among([member(worker)], now=SLOW) == []


def test_a_worker_that_was_away_is_seen_for_the_first_time(worker: UUID) -> None:
    witness = Witness()
    witness.dead_among([member(worker)], now=0.0)
    witness.dead_among([], now=1.0)

    assert witness.dead_among([member(worker)], now=SLOW) == []


def test_each_is_judged_alone() -> None:
    witness, dead, living = Witness(), uuid4(), uuid4()
    witness.dead_among([member(dead), member(living)], now=0.0)

    found = witness.dead_among([member(dead), member(living, beats=1)], now=FAST)

    assert [one.id for one in found] == [dead]
