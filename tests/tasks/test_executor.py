"""Which tasks may run in a process of their own, and what such a process may say."""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pgqueue import JobContext, OptionError, PgQueue, TaskDefinitionError
from pgqueue.context import Progress
from pgqueue.outcomes import (
    AttemptEnd,
    Cancelled,
    ErrorReport,
    Failed,
    Outcome,
    Retried,
    Snoozed,
    Succeeded,
)
from pgqueue.worker.processes.protocol import (
    AttemptKey,
    ProtocolError,
    answer,
    outcome_of,
    progress_of,
    refusal_of,
    report,
)

OF = AttemptKey(message_id=5, attempt=2)
ERROR = ErrorReport("ValueError", 'no "ü"\n', "Traceback ...")


def plain(number: int) -> None: ...


def with_context(ctx: JobContext, number: int) -> None: ...


def with_session(session: Session, number: int) -> None: ...


async def on_a_loop(number: int) -> None: ...


async def with_async_session(session: AsyncSession, number: int) -> None: ...


def closure() -> Callable[..., None]:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize("function", [plain, with_context])
def test_a_function_that_another_process_can_import_may_run_there(function: Any) -> None:
    task = PgQueue().task(executor="process", memory_limit=2**29)(function)

    assert task.settings.executor == "process"
    assert task.address == (__name__, function.__name__)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: None, "top level of a module"),
        (closure(), "top level of a module"),
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


def test_what_was_typed_into_an_interpreter_is_refused() -> None:
    typed = "import pgqueue\n@pgqueue.PgQueue().task(executor='process')\ndef f() -> None: ...\n"

    done = subprocess.run([sys.executable, "-"], input=typed, capture_output=True, text=True)

    assert "define it in a file" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "outcome",
    [
        Succeeded({"a": [1, None, "ü\n"]}),
        Succeeded(None),
        Retried(timedelta(seconds=1.5), ERROR),
        Failed(ERROR),
        Failed(ERROR, AttemptEnd.DISCARDED),
        Cancelled("why"),
        Snoozed(timedelta(hours=1)),
    ],
)
def test_an_outcome_arrives_as_it_was_said(outcome: Outcome) -> None:
    line = answer(OF, outcome)

    assert line.count(b"\n") == 1
    assert outcome_of(line, OF) == outcome


def said(**parts: Any) -> bytes:
    return json.dumps({"of": list(OF), **parts}).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"1" * 10_000,
        b"null",
        b"{}",
        b'{"of": [5, 2]}',
        b'{"of": [5, 3], "ending": "succeeded", "result": 1}',
        said(ending="succeeded"),
        said(ending="released"),
        said(ending="retried", delay="1", error=["a", "b", "c"]),
        said(ending="retried", delay=float("nan"), error=["a", "b", "c"]),
        said(ending="retried", delay=1, error=["a", "b"]),
        said(ending="retried", delay=1, error=["a", "b\0", "c"]),
        said(ending="retried", delay=1, error=["a", "\ud800", "c"]),
        said(ending="retried", delay=1, error=["a", "b" * 10_000, "c"]),
        said(ending="retried", delay=1, error=["a", {"b": 1}, "c"]),
        said(ending="failed", end="crashed", error=["a", "b", "c"]),
        said(ending="failed", end=["failed"], error=["a", "b", "c"]),
        said(ending="cancelled", reason=None),
        said(ending="snoozed", delay=None),
    ],
)
def test_what_no_handler_answers_is_nonsense(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        outcome_of(line, OF)
    with pytest.raises(ProtocolError):
        refusal_of(line)


def test_progress_arrives_as_it_was_reported() -> None:
    line = report(OF, Progress(1, 2.5, "ü\n"))

    assert progress_of(line, OF) == Progress(1, 2.5, "ü\n")
    assert progress_of(answer(OF, Succeeded(None)), OF) is None


@pytest.mark.parametrize(
    "line",
    [
        b'{"progress":',
        b'{"progress":[1,null,null],"of":[5,3]}',
        b'{"progress":[1,null],"of":[5,2]}',
        b'{"progress":[-1,null,null],"of":[5,2]}',
        b'{"progress":[NaN,null,null],"of":[5,2]}',
        b'{"progress":[1,2,3],"of":[5,2]}',
    ],
)
def test_progress_that_no_handler_reports_is_nonsense(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        progress_of(line, OF)


def test_a_result_is_looked_at_again_by_the_worker() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]

    kept = outcome_of(said(ending="succeeded", result=deep), OF)
    endless = outcome_of(said(ending="snoozed", delay=1e300), OF)

    assert isinstance(kept, Succeeded)
    assert list(kept.result) == ["unserialisable_result"]
    assert isinstance(endless, Snoozed)
    assert endless.delay < timedelta(days=40_000)
