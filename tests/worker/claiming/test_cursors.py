"""Frontiers: how far each pair has been claimed, and when to look behind."""

from dataclasses import replace

import pytest

from pgqueue.repository.claim import Claim, Claimed
from pgqueue.worker.claiming.cursors import START, ClaimCursors

NOW = "2026-01-01 12:00:10+00"
A_SECOND_AGO = "2026-01-01 12:00:09+00"
QUIET = (A_SECOND_AGO, 0)


def row(run_at: str, message_id: int, *, queue: str = "a", priority: int = 0) -> Claimed:
    return Claimed(
        priority=priority,
        run_at=run_at,
        message_id=message_id,
        job_id=message_id,
        queue=queue,
        task="tests.task",
        args="{}",
        max_attempts=1,
        attempt=1,
        crashes=0,
    )


def claim(*rows: Claimed, taken: int | None = None, read_at: str = NOW) -> Claim:
    count = len(rows) if taken is None else taken
    return Claim(sorted(rows), count, left=0, read_at=read_at, quiet_until=A_SECOND_AGO)


def keys(cursors: ClaimCursors) -> dict[tuple[str, int], tuple[str, int]]:
    """Where each pair goes on, of those that do not begin at the start."""
    pairs: dict[tuple[str, int], tuple[str, int]] = {
        (pair.queue, pair.priority): (pair.run_at, pair.message_id) for pair in cursors.pairs()
    }
    return {name: key for name, key in pairs.items() if key != START}


class TestPairs:
    def test_there_is_one_for_every_queue_and_priority_the_urgent_first(self) -> None:
        pairs = ClaimCursors(["a", "b"]).pairs()

        assert [pair.priority for pair in pairs] == [n for n in range(10) for _ in "ab"]
        assert {(pair.queue, pair.priority) for pair in pairs} == {
            (queue, priority) for queue in "ab" for priority in range(10)
        }
        assert all((pair.run_at, pair.message_id) == START for pair in pairs)

    def test_queues_of_one_priority_take_turns_to_be_first(self) -> None:
        cursors = ClaimCursors(["a", "b", "c"])

        first = [cursors.pairs()[0].queue for _ in range(6)]

        assert sorted(first[:3]) == ["a", "b", "c"]
        assert first[3:] == first[:3]

    def test_a_paused_queue_has_none(self) -> None:
        cursors = ClaimCursors(["a", "b"])

        assert {pair.queue for pair in cursors.pairs(paused=["a"])} == {"b"}
        assert cursors.pairs(paused=["a", "b"]) == []

    def test_a_queue_that_is_served_again_has_them_at_its_start(self) -> None:
        cursors = ClaimCursors(["a", "b"])
        cursors.advance(cursors.pairs(), claim(), limit=1)

        cursors.serve(["b"])
        cursors.serve(["a", "b"])

        places = {pair.queue: (pair.run_at, pair.message_id) for pair in cursors.pairs()}
        assert places == {"a": START, "b": QUIET}


class TestAdvance:
    def test_after_a_full_claim_the_last_pair_goes_on_behind_its_last_row(self) -> None:
        cursors = ClaimCursors(["a"])
        found = claim(row("2026-01-01 11:00:00+00", 1), row("2026-01-01 11:00:00.5+00", 2))

        cursors.advance(cursors.pairs(), found, limit=2)

        assert keys(cursors) == {("a", 0): ("2026-01-01 11:00:00.5+00", 2)}

    def test_pairs_before_the_last_are_exhausted_and_those_after_it_not_looked_at(self) -> None:
        cursors = ClaimCursors(["a"])
        found = claim(
            row("2026-01-01 11:00:00+00", 1, priority=1),
            row("2026-01-01 11:00:00+00", 2, priority=3),
        )

        cursors.advance(cursors.pairs(), found, limit=2)

        assert keys(cursors) == {
            ("a", 0): QUIET,
            ("a", 1): QUIET,
            ("a", 2): QUIET,
            ("a", 3): ("2026-01-01 11:00:00+00", 2),
        }

    def test_after_a_short_claim_every_pair_is_quiet_until_a_second_ago(self) -> None:
        cursors = ClaimCursors(["a", "b"])
        found = claim(row("2026-01-01 11:00:00+00", 1, queue="b", priority=4))

        cursors.advance(cursors.pairs(), found, limit=2)

        assert keys(cursors) == {
            (queue, priority): QUIET for queue in "ab" for priority in range(10)
        }

    def test_an_exhausted_pair_stays_behind_its_last_row_if_that_is_later(self) -> None:
        cursors = ClaimCursors(["a"])
        recent = "2026-01-01 12:00:09.7+00"

        cursors.advance(cursors.pairs(), claim(row(recent, 8)), limit=5)

        assert keys(cursors)["a", 0] == (recent, 8)

    def test_it_never_goes_back_by_itself(self) -> None:
        cursors = ClaimCursors(["a"])
        cursors.advance(cursors.pairs(), claim(row(A_SECOND_AGO, 9)), limit=1)

        cursors.advance(cursors.pairs(), claim(), limit=1)

        assert keys(cursors)["a", 0] == (A_SECOND_AGO, 9)

    def test_a_full_claim_of_nothing_but_dropped_messages_moves_nothing_on(self) -> None:
        cursors = ClaimCursors(["a"])

        cursors.advance(cursors.pairs(), claim(taken=3), limit=3)

        assert keys(cursors) == {}

    def test_dropped_messages_count_for_whether_a_claim_was_full(self) -> None:
        cursors = ClaimCursors(["a"])
        found = claim(row("2026-01-01 11:00:00+00", 1, priority=2), taken=3)

        cursors.advance(cursors.pairs(), found, limit=3)

        assert set(keys(cursors)) == {("a", 0), ("a", 1), ("a", 2)}
        assert keys(cursors)["a", 2] == ("2026-01-01 11:00:00+00", 1)

    def test_a_frontier_ahead_of_the_database_clock_starts_again(self) -> None:
        cursors = ClaimCursors(["a"])
        cursors.advance(cursors.pairs(), claim(row(A_SECOND_AGO, 9)), limit=1)
        set_back = "2026-01-01 11:59:00+00"

        cursors.advance(
            cursors.pairs(),
            Claim([], taken=0, left=0, read_at=set_back, quiet_until="2026-01-01 11:58:59+00"),
            limit=1,
        )

        assert ("a", 0) not in keys(cursors)
        assert keys(cursors)["a", 1] == ("2026-01-01 11:58:59+00", 0)

    @pytest.mark.parametrize(
        ("earlier", "later"),
        [
            ("2026-01-01 12:00:09+00", "2026-01-01 12:00:09.000001+00"),
            ("2026-01-01 12:00:09.1+00", "2026-01-01 12:00:09.11+00"),
            ("2026-01-01 12:00:09.9+00", "2026-01-01 12:00:10+00"),
            ("-infinity", "2000-01-01 00:00:00+00"),
        ],
    )
    def test_the_text_of_times_sorts_as_they_do(self, earlier: str, later: str) -> None:
        cursors = ClaimCursors(["a"])

        cursors.advance(cursors.pairs(), claim(row(earlier, 9), row(later, 1)), limit=2)

        assert keys(cursors)["a", 0] == (later, 1)

    def test_a_rewind_starts_every_pair_again(self) -> None:
        cursors = ClaimCursors(["a"])
        cursors.advance(cursors.pairs(), claim(), limit=1)

        cursors.rewind()

        assert keys(cursors) == {}


class TestLeft:
    def test_a_claim_that_has_left_messages_moves_nothing_on(self) -> None:
        """A later claim must find them."""
        cursors = ClaimCursors(["a"])
        found = replace(claim(row(A_SECOND_AGO, 9)), left=1)

        cursors.advance(cursors.pairs(), found, limit=2)

        assert keys(cursors) == {}
