"""How a claimer that finds no job goes to sleep, and when it looks for queues of a pattern."""

import pytest

from pgqueue.worker.claiming.queue_discovery import NEW_QUEUES_EVERY, QueueDiscovery
from pgqueue.worker.claiming.sleep import BRIEF, FALSE_ALARMS, FIRST_SLEEP, Sleep


def test_a_busy_worker_waits_briefly_twice_and_then_sleeps() -> None:
    sleep = Sleep(poll_interval=2.0)
    assert [sleep.found_nothing() for _ in range(3)] == [*BRIEF, None]

    sleep.armed(100.0)
    sleep.found_jobs()
    assert sleep.found_nothing() is None, "it is armed: one job does not wake it up for more"

    sleep.found_jobs()
    sleep.stay_awake()
    assert sleep.found_nothing() == BRIEF[0]


def test_each_sleep_is_as_long_as_all_before_it_up_to_the_poll_interval() -> None:
    sleep = Sleep(poll_interval=2.0)
    sleep.armed(100.0)
    assert [sleep.seconds(100.0 + after) for after in (0.0, 0.5, 60.0)] == [FIRST_SLEEP, 0.5, 1.96]


def test_many_notifications_without_a_job_are_false_alarms() -> None:
    sleep = Sleep(poll_interval=2.0)
    for _ in range(FALSE_ALARMS + 1):
        assert not sleep.has_many_false_alarms
        sleep.notified()
    assert sleep.has_many_false_alarms

    sleep.found_jobs()
    assert not sleep.has_many_false_alarms


def test_a_busy_worker_looks_for_queues_every_two_seconds_and_an_idle_one_at_once() -> None:
    discovery = QueueDiscovery(has_patterns=True)
    assert discovery.is_due(100.0, is_busy=True)
    discovery.looked(began=99.0, ended=99.02)
    discovery.looked(began=100.0, ended=100.01)

    assert not discovery.is_due(100.4, is_busy=False)
    assert discovery.seconds_left(100.4) == pytest.approx(0.1)
    assert discovery.is_due(100.6, is_busy=False)
    assert discovery.seconds_left(100.6) is None
    assert not discovery.is_due(100.6, is_busy=True)
    assert discovery.is_due(100.6 + NEW_QUEUES_EVERY, is_busy=True)

    discovery.make_due()
    assert discovery.is_due(100.6, is_busy=True)
    assert not QueueDiscovery(has_patterns=False).is_due(100.0, is_busy=False)


def test_one_slow_look_for_queues_delays_no_other() -> None:
    discovery = QueueDiscovery(has_patterns=True)
    discovery.looked(began=100.0, ended=100.06)  # the first one compiles its statement
    assert discovery.is_due(100.06, is_busy=False)

    discovery.looked(began=100.1, ended=100.102)
    discovery.looked(began=100.3, ended=100.36)
    assert discovery.is_due(100.41, is_busy=False)
