"""The witness: death is a heartbeat seen unchanged for the whole grace, by oneself."""

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from pgqueue.repository.rescue import SeenWorker
from pgqueue.worker.liveness import FAST_GRACE, LONGEST_GAP, SLOW_GRACE, Witness

BEAT = datetime(2020, 1, 1, tzinfo=UTC)
FAST, SLOW = FAST_GRACE.total_seconds(), SLOW_GRACE.total_seconds()


def member(id: UUID, *, beats: int = 0, is_locked: bool = False) -> SeenWorker:
    return SeenWorker(id, BEAT + timedelta(seconds=beats), is_locked)


def look(witness: Witness, members: list[SeenWorker], *, at: float) -> list[SeenWorker]:
    """A look that takes no time."""
    return witness.dead_among(members, asked_at=at, answered_at=at)


def watch(
    witness: Witness, members: list[SeenWorker], *, start: float, end: float
) -> list[SeenWorker]:
    """One look after the other; who was dead at the last."""
    dead = look(witness, members, at=start)
    while start + LONGEST_GAP < end:
        start += LONGEST_GAP
        dead = look(witness, members, at=start)
    return dead


@pytest.fixture
def worker() -> UUID:
    return uuid4()


def test_nobody_is_dead_at_first_sight_however_old_the_beat(worker: UUID) -> None:
    assert look(Witness(), [member(worker)], at=10_000.0) == []


@pytest.mark.parametrize(("is_locked", "grace"), [(False, FAST), (True, SLOW)])
def test_a_worker_is_dead_after_its_grace_and_not_before(
    worker: UUID, is_locked: bool, grace: float
) -> None:
    witness, seen = Witness(), member(worker, is_locked=is_locked)
    watch(witness, [seen], start=100.0, end=100.0 + grace - 0.001)

    assert look(witness, [seen], at=100.0 + grace - 0.001) == []
    assert look(witness, [seen], at=100.0 + grace) == [seen]


def test_a_lock_that_is_lost_makes_the_grace_short_at_once(worker: UUID) -> None:
    witness = Witness()
    assert watch(witness, [member(worker, is_locked=True)], start=0.0, end=FAST) == []

    unlocked = member(worker)

    assert look(witness, [unlocked], at=FAST) == [unlocked]


def test_a_beat_begins_the_grace_again(worker: UUID) -> None:
    witness, later = Witness(), member(worker, beats=1)
    watch(witness, [member(worker)], start=0.0, end=FAST)
    watch(witness, [later], start=FAST - 0.1, end=2 * FAST)

    assert look(witness, [later], at=2 * FAST - 0.2) == []
    assert look(witness, [later], at=2 * FAST) == [later]


def test_the_time_a_look_takes_is_no_time_without_a_beat(worker: UUID) -> None:
    """The database may have read the beat at the end of it, or at the beginning."""
    witness, seen = Witness(), member(worker)
    witness.dead_among([seen], asked_at=0.0, answered_at=1.0)

    assert witness.dead_among([seen], asked_at=0.9 + FAST, answered_at=1.0 + FAST) == []
    assert look(witness, [seen], at=1.3 + FAST) == [seen]


def test_a_witness_that_stood_still_has_seen_nothing_meanwhile(worker: UUID) -> None:
    """It and those it looks at may have waited for the same lock, or been frozen together."""
    witness, seen = Witness(), member(worker)
    look(witness, [seen], at=0.0)

    assert look(witness, [seen], at=10 * SLOW) == []
    assert look(witness, [seen], at=10 * SLOW + FAST - LONGEST_GAP) == [seen]


def test_a_look_that_waited_for_a_lock_has_seen_nothing_meanwhile(worker: UUID) -> None:
    witness, seen = Witness(), member(worker)
    look(witness, [seen], at=0.0)
    witness.dead_among([seen], asked_at=0.5, answered_at=10 * SLOW)

    assert look(witness, [seen], at=10 * SLOW + 0.1) == []


def test_it_knows_when_the_next_may_be_dead(worker: UUID) -> None:
    witness, other = Witness(), uuid4()
    assert witness.next_death_at == float("inf")
    look(witness, [member(worker)], at=0.0)
    look(witness, [member(worker), member(other, is_locked=True)], at=0.5)

    assert witness.next_death_at == FAST


def test_a_beat_that_goes_back_is_a_beat(worker: UUID) -> None:
    witness = Witness()
    look(witness, [member(worker, beats=5)], at=0.0)

    assert look(witness, [member(worker, beats=4)], at=FAST) == []


def test_a_new_witness_has_seen_nothing(worker: UUID) -> None:
    old = Witness()
    look(old, [member(worker)], at=0.0)

    assert look(Witness(), [member(worker)], at=SLOW) == []


def test_a_worker_that_was_away_is_seen_for_the_first_time(worker: UUID) -> None:
    witness = Witness()
    look(witness, [member(worker)], at=0.0)
    look(witness, [], at=1.0)

    assert look(witness, [member(worker)], at=SLOW) == []


def test_each_is_judged_alone() -> None:
    witness, dead, living = Witness(), uuid4(), uuid4()
    watch(witness, [member(dead), member(living)], start=0.0, end=FAST)

    found = look(witness, [member(dead), member(living, beats=1)], at=FAST)

    assert [one.id for one in found] == [dead]
