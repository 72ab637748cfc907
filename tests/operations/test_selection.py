"""Selections: ids or conditions, and what they refuse."""

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from pgqueue import OptionError, Selection
from pgqueue.operations.actions import ON_JOBS


def test_a_selection_has_ids_or_conditions() -> None:
    jobs = Selection([1, 2])

    assert jobs.also() == jobs
    with pytest.raises(OptionError, match="ids and conditions are given"):
        jobs.also(status=["failed"])


def test_another_condition_replaces_one_of_the_same_name() -> None:
    failed = Selection(task="send", status="failed")

    assert failed.also(task="pay", queue="mail") == Selection(
        task="pay", queue="mail", status="failed"
    )


def test_ids_are_counted_as_they_are_given_and_have_no_preview(engine: Engine) -> None:
    jobs = Selection([1, 2, 3])

    with Session(engine) as session:
        assert (jobs.count(session), jobs.count(session, limit=2)) == (3, 2)
        with pytest.raises(OptionError, match="preview: ids are given"):
            jobs.preview(session, ON_JOBS["requeue"])
