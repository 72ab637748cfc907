"""What an attempt tells in the log."""

import logging
from threading import Thread

import pytest

from pgqueue.handler.outcome import log_waiting


def test_threads_that_meet_a_reason_at_the_same_time_log_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reason = "task sent: its stored arguments are of another version"
    other = Thread(target=log_waiting, args=(reason,))

    def meet(_record: logging.LogRecord) -> bool:
        if other.ident is None:
            other.start()
            other.join(1)  # until it has logged, or waits for this thread
        return True

    logger = logging.getLogger("pgqueue.handler.outcome")
    logger.addFilter(meet)
    try:
        log_waiting(reason)
        other.join()
    finally:
        logger.removeFilter(meet)

    assert len([line for line in caplog.messages if reason in line]) == 1
