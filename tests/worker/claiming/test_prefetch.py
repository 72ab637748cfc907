"""Prefetch: as much ahead as the handlers' speed asks for, and never what would wait long."""

import pytest

from pgqueue.worker.claiming.prefetch import HORIZON, LONGEST_BUFFERED, TOO_OLD, Prefetch

MOST = 1000


class Handlers:
    """Handlers of this speed, in ten slots, and the prefetch that follows them."""

    def __init__(self, jobs_per_second: float = 100_000, *, most: int = MOST) -> None:
        self.prefetch = Prefetch(slots=10, most=most)
        self._ran = (0, 0.0)
        self.run(jobs_per_second)

    def run(self, jobs_per_second: float) -> None:
        """Run long enough that earlier speeds do not count."""
        for _ in range(30):
            jobs, busy = self._ran
            self._ran = jobs + 1000, busy + 10 * 1000 / jobs_per_second
            self.prefetch.ran(*self._ran)

    def run_dry(self, times: int = 1) -> list[int]:
        seen = []
        for _ in range(times):
            self.prefetch.ran_dry()
            seen.append(self.prefetch.ahead)
        return seen


def test_nothing_is_claimed_ahead_before_any_job_has_ended() -> None:
    prefetch = Prefetch(slots=10, most=MOST)

    prefetch.ran_dry()

    assert prefetch.ahead == 0


def test_it_begins_at_the_slots_and_doubles_whenever_a_slot_runs_dry() -> None:
    assert Handlers().run_dry(8) == [10, 20, 40, 80, 160, 320, 640, MOST]


@pytest.mark.parametrize("most", [0, 7])
def test_no_more_is_claimed_ahead_than_the_worker_may(most: int) -> None:
    assert max(Handlers(most=most).run_dry(8)) == most


def test_no_more_is_claimed_ahead_than_the_handlers_run_within_the_horizon() -> None:
    assert Handlers(5_000).run_dry(10)[-1] == pytest.approx(5_000 * HORIZON, abs=1)


def test_for_slow_handlers_nothing_is_claimed_ahead() -> None:
    assert Handlers(20).run_dry() == [0]


def test_it_is_halved_when_a_job_has_waited_too_long_and_only_then() -> None:
    handlers = Handlers()
    handlers.run_dry(4)

    handlers.prefetch.oldest_waits(TOO_OLD)
    kept = handlers.prefetch.ahead
    handlers.prefetch.oldest_waits(TOO_OLD + 0.001)

    assert (kept, handlers.prefetch.ahead) == (80, 40)


def test_when_the_handlers_slow_down_fewer_are_claimed_ahead() -> None:
    handlers = Handlers()
    handlers.run_dry(10)

    handlers.run(20)

    assert handlers.prefetch.ahead == 0


def test_a_time_in_which_no_slot_was_busy_says_nothing() -> None:
    handlers = Handlers()

    handlers.prefetch.ran(1_000_000, 0.0)

    assert handlers.run_dry() == [10]


def test_nothing_is_claimed_ahead_when_jobs_had_to_be_released() -> None:
    handlers = Handlers()
    handlers.run_dry(4)

    handlers.prefetch.oldest_waits(LONGEST_BUFFERED + 0.001)

    assert handlers.prefetch.ahead == 0


def test_a_claim_ahead_waits_until_free_slots_have_claimed_as_many_as_the_last_one_left() -> None:
    handlers = Handlers()
    handlers.run_dry()
    prefetch = handlers.prefetch
    prefetch.claimed(taken=10, left=0, limit=10, is_ahead=False)
    before = prefetch.room(free=2, buffered=0)

    prefetch.claimed(taken=7, left=3, limit=10, is_ahead=True)
    beside = prefetch.room(free=2, buffered=0), prefetch.room(free=0, buffered=0)
    low_water = prefetch.low_water
    prefetch.claimed(taken=2, left=0, limit=2, is_ahead=False)
    prefetch.claimed(taken=2, left=0, limit=2, is_ahead=False)

    assert before == (10, True)
    assert (beside, low_water) == (((2, False), (0, False)), 0)
    assert (prefetch.room(free=2, buffered=0), prefetch.low_water) == ((10, True), 10)


def test_nothing_is_claimed_ahead_after_a_claim_that_was_not_full() -> None:
    handlers = Handlers()
    handlers.run_dry()

    handlers.prefetch.claimed(taken=9, left=0, limit=10, is_ahead=False)

    assert handlers.prefetch.room(free=2, buffered=0) == (2, False)
