"""What is known of one job, and of other sessions."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from pgqueue import JobNotFound
from pgqueue.repository.health import Health
from pgqueue.repository.listing import Listing


def test_a_missing_job_is_named(session: Session) -> None:
    with pytest.raises(JobNotFound, match="job 4711 does not exist"):
        Listing(session).job(4711)


def test_an_idle_transaction_is_named_with_its_process_and_age(
    session: Session, engine: Engine
) -> None:
    with Session(engine) as idle:
        pid = idle.execute(text("SELECT pg_backend_pid()")).scalar_one()

        old = Health(session).old_transactions(timedelta(0))

    [found] = [one for one in old if f"session {pid} of " in one.who]
    assert found.state == "idle in transaction"
    assert found.seconds >= 0
