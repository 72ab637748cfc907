"""Selections: ids or conditions, and what they refuse."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from traps import every_condition

from pgqueue import ArgumentsError, OptionError, Selection
from pgqueue.operations.actions import ON_JOBS
from pgqueue.repository.conditions import JobFilter


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


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"ids": [1], "task": "send"}, "ids and conditions are given"),
        ({"status": "lost"}, "status is .'lost'.; give one or several of"),
        ({"colour": "red"}, "there is no condition 'colour'"),
        ({"task": 7}, "Selection: task must be a str, not int$"),
        ({"error": "timeout"}, "is no error as `pgqueue failures` prints it"),
        ({"took": 3}, "Selection: took must be a timedelta, not int$"),
        ({"ids": ["x"]}, "id"),
        ({"ids": 5}, "ids is 5; give a list of ids"),
        ({"status": 5}, "status is 5; give one status"),
        ({"batch": 2**70}, "batch"),
        ({"error": 2**70}, "is no error"),
        ({"task": "a\0b"}, "task is .*; give a text"),
        ({"text": "\ud800"}, "text is .*; give a text"),
        ({"args": 5}, "args is 5; give a dict of arguments by name"),
        ({"args": {"n": ["\0"]}}, "holds a NUL character"),
        ({"created_after": timedelta.max}, "longer than a hundred years"),
        ({"are_due": True}, "there is no condition 'are_due'"),
        ({"task": None, "status": "failed"}, "task is None; leave it out"),
    ],
    ids=str,
)
def test_a_wrong_selection_is_refused(words: dict[str, Any], error: str) -> None:
    with pytest.raises((OptionError, ArgumentsError), match=error):
        Selection(**words)


def test_every_condition_of_a_filter_survives_in_the_log() -> None:
    which = JobFilter(**every_condition())

    found = Selection.from_target(Selection.of(which).target).which

    assert found == which
