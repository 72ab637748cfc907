"""Which tasks may run in a process of their own."""

from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pgqueue import JobContext, OptionError, PgQueue, TaskDefinitionError


def plain(number: int) -> None: ...


def with_context(ctx: JobContext, number: int) -> None: ...


def with_session(session: Session, number: int) -> None: ...


async def on_a_loop(number: int) -> None: ...


async def with_async_session(session: AsyncSession, number: int) -> None: ...


@pytest.mark.parametrize("function", [plain, with_context, lambda: None])
def test_any_plain_function_may_run_there(function: Any) -> None:
    task = PgQueue().task(executor="process", memory_limit=2**29, name="some.task")(function)

    assert task.in_process


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (on_a_loop, "plain functions"),
        (with_session, "open queue.session"),
        (with_async_session, "plain functions"),
    ],
)
def test_a_function_that_could_not_run_there_is_refused(function: Any, words: str) -> None:
    with pytest.raises(TaskDefinitionError, match=words) as refusal:
        PgQueue().task(executor="process", name="some.task")(function)

    assert "some.task" in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"executor": "fiber"}, "'thread' or 'process'"),
        ({"executor": None}, "'thread' or 'process'"),
        ({"executor": "process", "transactional": True}, "cannot be transactional"),
        ({"memory_limit": 2**29}, "executor='process' too"),
        ({"executor": "process", "memory_limit": 1.5e9}, "whole number"),
        ({"executor": "process", "memory_limit": 512}, "whole number"),
        ({"executor": "process", "memory_limit": True}, "whole number"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        PgQueue().task(**options)(plain)


def test_processes_are_refused_where_they_could_not_be_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pgqueue.options.HAS_PROCESS_GROUPS", False)

    with pytest.raises(OptionError, match="POSIX"):
        PgQueue().task(executor="process")(plain)


def test_memory_cannot_be_limited_where_the_platform_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pgqueue.options.CAN_LIMIT_MEMORY", False)

    with pytest.raises(OptionError, match="this platform"):
        PgQueue().task(executor="process", memory_limit=2**29)(plain)
