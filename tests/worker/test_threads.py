"""The threads of a worker."""

import pytest

from pgqueue.worker import threads
from pgqueue.worker.threads import WorkerThread


class WithoutMemory(WorkerThread):
    """Comes to its end before its first step, as a thread does that finds no memory."""

    def run(self) -> None: ...

    def work(self) -> None: ...


def test_a_thread_that_does_not_begin_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "BEGINS_WITHIN", 0.2)

    with pytest.raises(RuntimeError, match="pgqueue-slot has not begun"):
        WithoutMemory(name="slot").start()
