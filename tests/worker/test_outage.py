"""An outage: what is one, and what is told of what is none."""

import time

import pytest
from psycopg import errors
from sqlalchemy.exc import OperationalError

from pgqueue.worker.outage import Outage, is_away


def met(error: Exception) -> OperationalError:
    return OperationalError("SELECT 1", {}, error)


def test_one_connection_too_many_is_no_outage() -> None:
    crowded = met(errors.OperationalError("FATAL:  sorry, too many clients already"))

    assert not is_away(crowded)


def test_a_full_disk_is_no_outage() -> None:
    assert not is_away(met(errors.DiskFull("could not extend file: No space left on device")))


def test_a_server_that_stops_starts_or_takes_no_writes_is_one() -> None:
    for error in (errors.AdminShutdown, errors.CannotConnectNow, errors.ReadOnlySqlTransaction):
        assert is_away(met(error("FATAL")))
    assert is_away(met(errors.OperationalError("connection refused")))


def test_a_failure_under_way_when_an_outage_ends_begins_no_new_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage, refused = Outage(), met(errors.OperationalError("connection refused"))
    began_at = time.monotonic()
    outage.record_error(refused, name="claimer", opened_at=began_at)
    outage.record_answer(asked_at=time.monotonic(), name="claimer")

    outage.record_error(refused, name="rescuer", opened_at=began_at)
    assert caplog.text.count("waiting for the database") == 1

    outage.record_error(refused, name="rescuer", opened_at=time.monotonic())
    assert caplog.text.count("waiting for the database") == 2


def test_a_database_that_refuses_to_write_is_logged_once_although_it_answers_reads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage, refused = Outage(), met(errors.ReadOnlySqlTransaction("cannot execute UPDATE"))
    for _ in range(3):
        outage.record_error(refused, name="claimer", opened_at=time.monotonic())
        outage.record_answer(asked_at=time.monotonic(), name="claimer")

    assert caplog.text.count("waiting for the database") == 1
    assert "answers again" not in caplog.text

    outage.record_answer(asked_at=time.monotonic(), name="heartbeat")
    assert caplog.text.count("answers again") == 1
