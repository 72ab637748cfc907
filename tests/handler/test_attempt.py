"""An attempt, as other threads see it."""

import uuid
from threading import Event

import pytest

from pgqueue import PgQueue
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.outcomes import AttemptEnd
from pgqueue.repository.claim import Claimed


class RecordingChild:
    pid = 7

    def __init__(self) -> None:
        self.kills: list[AttemptEnd] = []

    def notify(self, attempt: RunningAttempt) -> None: ...

    def kill(self, end: AttemptEnd) -> None:
        self.kills.append(end)

    def show_stack(self) -> None: ...


@pytest.mark.parametrize("has_left", [False, True])
def test_a_kill_hits_a_child_only_while_it_runs_this_attempt(has_left: bool) -> None:
    task = PgQueue().task(name="t", executor="process")(lambda: None)
    claimed = Claimed(5, "2030-01-01", 1, 1, "default", "t", "{}", 1, 1, 0)
    attempt = RunningAttempt(claimed, task, worker_id=uuid.uuid4(), stopping=Event())
    child = RecordingChild()
    attempt.begin_in(child)
    if has_left:
        attempt.leave_child()

    attempt.kill()

    assert child.kills == ([] if has_left else [AttemptEnd.CANCELLED])
