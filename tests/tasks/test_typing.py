"""A task keeps its signature: the type checker sees a wrong call, and so does the decoration.

``tests/typing/right.py`` and ``wrong.py`` say in a comment what mypy is to answer on a line:
``# N:`` a revealed type, ``# E:`` the codes of its errors.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mypy import api
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pgqueue import JobContext, PgQueue, TaskDefinitionError

if TYPE_CHECKING:
    from decimal import Decimal as SeenByTheCheckerOnly

ROOT = Path(__file__).parents[2]
RIGHT = Path("tests/typing/right.py")
WRONG = Path("tests/typing/wrong.py")

ERROR = re.compile(r"(?P<file>[^:]+):(?P<line>\d+): error: .*\[(?P<code>[\w-]+)\]")
REVEALED = re.compile(r'(?P<file>[^:]+):(?P<line>\d+): note: Revealed type is "(?P<type>.*)"')
MODULE = re.compile(r"\b(?:[a-z_]+\.)+")


@pytest.fixture(scope="module")
def answers() -> list[str]:
    """What mypy --strict says about both files."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(ROOT)
        flags = [
            "--config-file=",
            "--strict",
            "--no-pretty",
            "--follow-imports=silent",
            "--cache-dir=.mypy_cache/typing",
        ]
        limit = sys.getrecursionlimit()
        answer, trouble, _ = api.run([*flags, str(RIGHT), str(WRONG)])
        sys.setrecursionlimit(limit)  # mypy raises it, and later tests count on it
    assert not trouble
    return answer.splitlines()


@pytest.mark.journey
def test_right_uses_are_accepted(answers: list[str]) -> None:
    assert [line for line in answers if line.startswith(str(RIGHT)) and ": error:" in line] == []


@pytest.mark.journey
def test_what_the_queue_fills_in_is_gone_from_the_signature(answers: list[str]) -> None:
    found = [match for line in answers if (match := REVEALED.match(line))]

    revealed = {int(match["line"]): MODULE.sub("", match["type"]) for match in found}

    assert revealed == comments_of(RIGHT, "N")
    assert len(revealed) > 8


@pytest.mark.journey
def test_wrong_uses_are_refused_where_they_stand(answers: list[str]) -> None:
    expected = {line: set(codes.split()) for line, codes in comments_of(WRONG, "E").items()}
    found: dict[int, set[str]] = {}

    for match in filter(None, map(ERROR.match, answers)):
        if match["file"] == str(WRONG):
            found.setdefault(int(match["line"]), set()).add(match["code"])

    assert found.keys() == expected.keys()
    assert {line: found[line] & codes for line, codes in expected.items()} == expected


@pytest.mark.journey
def test_pyright_accepts_and_refuses_the_same_uses() -> None:
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")
    program = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]

    checked = subprocess.run(
        [*program, RIGHT, WRONG], cwd=ROOT, capture_output=True, text=True, check=False
    )

    errors = {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in json.loads(checked.stdout)["generalDiagnostics"]
        if each["severity"] == "error"
    }
    assert errors == {(WRONG.name, line) for line in comments_of(WRONG, "E")}


def comments_of(file: Path, mark: str) -> dict[int, str]:
    """What the lines of a file say that mypy will answer."""
    lines = enumerate((ROOT / file).read_text("utf-8").splitlines(), start=1)
    return {
        number: line.split(f"# {mark}: ")[1].strip()
        for number, line in lines
        if f"# {mark}: " in line
    }


def first_is_any(first: Any) -> None: ...
def first_is_object(first: object) -> None: ...
def first_after_a_session_is_any(session: Session, first: Any) -> None: ...
def trailing_session(number: int, session: Session) -> None: ...
def trailing_context(number: int, ctx: JobContext) -> None: ...
def context_between(session: Session, number: int, ctx: JobContext) -> None: ...
def keyword_only_session(*, session: Session) -> None: ...
def keyword_only_context(number: int, *, ctx: JobContext) -> None: ...
def two_sessions(session: Session, other: Session) -> None: ...
def both_kinds(session: Session, other: AsyncSession) -> None: ...
def async_session_without_async(session: AsyncSession) -> None: ...
async def session_in_async(session: Session) -> None: ...
def unreadable(amount: "SeenByTheCheckerOnly") -> None: ...
def any_number(*numbers: int) -> None: ...
def any_keyword(**numbers: int) -> None: ...
def positional_only(number: int, /) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (first_is_any, "first parameter 'first'"),
        (first_is_object, "first parameter 'first'"),
        (first_after_a_session_is_any, "first parameter 'first'"),
        (trailing_session, "'session' is a Session, .* move it to the front"),
        (trailing_context, "'ctx' is a JobContext, .* move it to the front"),
        (context_between, "'ctx' is a JobContext, .* move it to the front"),
        (keyword_only_session, r"not after \*"),
        (keyword_only_context, "'ctx' is a JobContext, .* move it to the front"),
        (two_sessions, "once each"),
        (both_kinds, "a Session or an AsyncSession"),
        (async_session_without_async, "must be `async def`"),
        (session_in_async, "is given an AsyncSession"),
        (unreadable, "'SeenByTheCheckerOnly' cannot be read .* outside `if TYPE_CHECKING:`"),
        (any_number, "'numbers' takes any number of arguments: take a list"),
        (any_keyword, "'numbers' takes any keyword: take a dict"),
        (positional_only, "'number' is positional-only"),
    ],
)
def test_a_signature_that_would_be_filled_in_wrongly_is_refused_at_decoration(
    function: Callable[..., Any], words: str
) -> None:
    queue = PgQueue()

    with pytest.raises(TaskDefinitionError, match=words) as caught:
        queue.task(function)

    assert isinstance(caught.value, TypeError)
    assert function.__qualname__ in str(caught.value)
    assert queue.tasks == {}
