"""What a worker knows of the waits in other processes."""

import pytest

from pgqueue.repository.claim import Claimed
from pgqueue.repository.watches import ids_in
from pgqueue.worker import watched
from pgqueue.worker.watched import WatchedJobs


def job(id: int) -> Claimed:
    return Claimed(5, "", id, id, "default", "t", "{}", 1, 1, 0)


def test_only_announced_jobs_are_told_of() -> None:
    jobs = WatchedJobs()
    assert not jobs.are_some

    jobs.heard("1,3")

    assert jobs.are_some
    assert jobs.among([job(1), job(2), job(3)]) == [1, 3]


def test_a_job_that_is_not_announced_again_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = WatchedJobs()
    jobs.heard("1,2")
    monkeypatch.setattr(watched, "FORGET_AFTER", 0.0)

    assert jobs.among([job(1)]) == [1]
    jobs.heard("2")
    assert jobs.among([job(1), job(2)]) == [2]
    jobs.among([])
    assert not jobs.are_some


def test_announcements_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "MOST", 10)
    jobs = WatchedJobs()

    for id in range(100):
        jobs.heard(str(id))

    assert len(jobs.among([job(id) for id in range(100)])) <= 20


@pytest.mark.parametrize("payload", ["", "test", "1;2", "-1", "9" * 5000, "²"])
def test_what_is_no_id_in_a_notification_is_ignored(payload: str) -> None:
    assert ids_in(payload) == []
