"""Rows written behind our back that would fail the claims of all: the tables refuse them."""

import pytest
import worker_tasks
from bad_rows import REFUSED
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session


def test_what_would_fail_the_claims_of_all_is_refused_by_the_tables(engine: Engine) -> None:
    with Session(engine) as session:
        id = worker_tasks.quick.enqueue(session, 1).id
        lease = (
            "INSERT INTO pgqueue.leases (target_id, message_id, attempt, worker_id) "
            "VALUES (:id, 1, 1, gen_random_uuid())"
        )
        session.execute(text(lease), {"id": id})

        for change in REFUSED:
            with pytest.raises(IntegrityError), session.begin_nested():
                session.execute(text(f"UPDATE pgqueue.{change}"))
