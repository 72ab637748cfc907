"""What must not be seen is masked, wherever and however it is written."""

import ast
import io
import json
import logging
import logging.handlers
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from queue import Queue
from time import process_time
from typing import Annotated, Any, NewType, NotRequired, TypedDict

import pydantic
import pytest

import pgqueue
from pgqueue import PgQueue, Secret, redaction
from pgqueue.errors import OptionError, TaskDefinitionError
from pgqueue.handler.error_reports import MAX_MESSAGE_BYTES, report, storable_words
from pgqueue.outcomes import ErrorReport
from pgqueue.redaction import MASK, is_secret, redacted, redacted_data, secrets_among

CANARY = "c4n4ry-S3cr3t"


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://app:{}@db.example.org/shop",
        "postgresql+psycopg://:{}@/shop",
        "amqp://guest:p@ss{}@host could not be reached",
        "postgresql:///shop?password={}",
        "postgresql:///shop?sslmode=require&sslpassword={}&connect_timeout=5",
    ],
)
def test_the_password_of_a_url_is_masked(text: str) -> None:
    seen = redacted(text.format(CANARY))

    assert CANARY not in seen
    assert MASK in seen


def test_a_secret_that_is_a_key_of_a_dict_is_masked() -> None:
    data = {"tokens": {CANARY: "valid", f"old {CANARY}": {f"of {CANARY}": 1}}, "token": CANARY}

    assert redacted_data(data, names=["token"], secrets=[CANARY]) == {
        "tokens": {MASK: "valid", f"old {MASK}": {f"of {MASK}": 1}},
        "token": MASK,
    }


def test_two_secrets_that_are_keys_both_keep_their_values() -> None:
    data = {"first-secret": 1, "second-secret": 2}
    assert list(redacted_data(data, secrets=[*data]).values()) == [1, 2]


@pytest.mark.parametrize("secret", ['c4n4ry-"S3cr3t"', "c4n4ry\nS3cr3t-ö", "it's-c4n4ry-ö"])
@pytest.mark.parametrize(
    "quoted",
    [
        lambda secret: json.dumps({"t": secret}),
        lambda secret: json.dumps({"t": secret}, ensure_ascii=False),
        lambda secret: repr({"t": secret.encode()}),
        lambda secret: repr({"t": secret}),
        lambda secret: repr(f"it is {secret}, said 'a' and \"b\""),
    ],
)
def test_a_secret_is_masked_in_each_form_in_which_python_quotes_it(
    secret: str, quoted: Callable[[str], str]
) -> None:
    seen = redacted(quoted(secret), [secret])

    assert "n4ry" not in seen
    assert "S3cr" not in seen


@pytest.mark.parametrize(
    "text",
    [
        "password=4711",
        '{"api_key": "4711"}',
        "Authorization: Bearer 4711",
        "https://example.org/a:b/c?d=e",
        "ratio 3:4 @ noon",
        "the password is wrong",
        "connection to server at 127.0.0.1, port 5432 failed",
    ],
)
def test_other_words_stay(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize("form", ["{}", "{!r}", "value={}!", "a{}b"])
@pytest.mark.parametrize("secret", [CANARY, 'it\'s "quoted"\n', "ümläut&=", "-----BEGIN\nKEY"])
def test_a_secret_of_the_job_is_masked_in_every_spelling(form: str, secret: str) -> None:
    seen = redacted(form.format(secret), [secret])

    assert secret not in seen
    assert repr(secret)[1:-1] not in seen


def test_a_short_secret_is_masked_where_it_stands_alone() -> None:
    assert redacted("cvv 123 of 41234", ["123"]) == "cvv *** of 41234"


def test_a_secret_within_another_leaves_nothing_of_the_longer() -> None:
    assert redacted("abcdefgh abcd", ["abcd", "abcdefgh"]) == "*** ***"


def test_text_beside_too_many_secrets_is_not_shown() -> None:
    assert redacted("whatever", map(str, range(10_000))) == MASK


def test_data_is_masked_by_name_and_by_value() -> None:
    data = {
        "card": "4111", "note": f"see {CANARY}", "db": f"x://u:{CANARY}@h", "n": 7, "none": None,
        "deep": [{"password": "4711", "card": "4111"}, CANARY],
    }  # fmt: skip

    seen = redacted_data(data, names=("card",), secrets=(CANARY,))

    assert seen == {
        "card": MASK, "note": f"see {MASK}", "db": f"x://u:{MASK}@h", "n": 7, "none": None,
        "deep": [{"password": "4711", "card": "4111"}, MASK],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ('{"a": "x1", "b": "y"}', ("x1",)),
        ({"a": {"k": ["x1", 7, None, True]}}, ("7", "x1")),
        ("not json", ()),
        ("[1]", ()),
        ("{}", ()),
    ],
)
def test_secrets_are_the_values_of_the_arguments_named(args: Any, found: tuple[str, ...]) -> None:
    assert tuple(sorted(secrets_among(args, ("a",)))) == found
    assert secrets_among(args, ()) == ()


@pytest.mark.parametrize("text", ["a:" * 16000, "://" * 10000, "?password" * 4000])
def test_no_text_keeps_the_worker_busy(text: str) -> None:
    start = process_time()

    redacted(text)

    assert process_time() - start < 2


def chained() -> BaseException:
    try:
        try:
            raise KeyError(CANARY)
        except KeyError as error:
            raise ValueError(f"no {CANARY}") from error
    except ValueError as error:
        error.add_note(f"noted {CANARY}")
        return ExceptionGroup("several", [error, OSError(f"again {CANARY}")])


def test_an_error_record_quotes_no_secret_of_its_job() -> None:
    found = report(chained(), secrets=(CANARY,))

    assert CANARY not in f"{found.message}{found.traceback}"
    assert found.traceback.count(MASK) == 4
    assert CANARY in report(chained()).traceback  # the mask is the only reason
    assert storable_words(f"because {CANARY}", secrets=(CANARY,)) == f"because {MASK}"


@pytest.mark.parametrize("offset", range(-len(CANARY), 1))
@pytest.mark.parametrize("total", [3, 40])
def test_a_cut_never_leaves_half_of_a_secret(offset: int, total: int) -> None:
    """At the cut of what is kept, and at that of what is looked at."""
    gap = len("\n... 32,768 characters in all ...\n")
    half = (MAX_MESSAGE_BYTES - gap) // 2
    for place in (half, 4 * half):
        text = "." * (place + offset) + CANARY + "." * MAX_MESSAGE_BYTES * total

        found: ErrorReport = report(ValueError(text), secrets=(CANARY,))

        assert CANARY[:5] not in found.message


def test_a_log_line_and_its_traceback_are_redacted() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("pgqueue.tests").addHandler(handler)
    try:
        raise ValueError(f"postgresql://u:{CANARY}@h")
    except ValueError:
        redaction.logger("pgqueue.tests").exception("lost %s", f"amqp://u:{CANARY}@h")
    logging.getLogger("pgqueue.tests").removeHandler(handler)

    assert CANARY not in stream.getvalue()
    assert "Traceback" in stream.getvalue()


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What a log aggregator is given of the lines of a module."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[assignment,method-assign]
    logger = logging.getLogger("pgqueue.tests")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("template", "args", "line"),
    [
        ("lost %s", (f"amqp://u:{CANARY}@h",), "lost amqp://u:***@h"),
        ("lost %s", (ValueError(f"amqp://u:{CANARY}@h"),), "lost amqp://u:***@h"),
        ("lost %r", (f"amqp://u:{CANARY}@h",), "lost 'amqp://u:***@h'"),
        ("lost %r", (ValueError(f"amqp://u:{CANARY}@h"),), "lost ValueError('amqp://u:***@h')"),
        ("job %d after %.1f s: %s", (7, 1.25, None), "job 7 after 1.2 s: None"),
        (
            "job %(id)d: %(why)s",
            ({"id": 7, "why": f"amqp://u:{CANARY}@h"},),
            "job 7: amqp://u:***@h",
        ),
        ("jobs %s", ([7, 8],), "jobs [7, 8]"),
        (f"amqp://u:{CANARY}@h", (), "amqp://u:***@h"),
        ("100 %", (), "100 %"),
    ],
)
def test_a_log_record_keeps_its_template_and_its_message_is_redacted(
    records: list[logging.LogRecord], template: str, args: tuple[Any, ...], line: str
) -> None:
    redaction.logger("pgqueue.tests").warning(template, *args)

    [record] = records
    assert record.getMessage() == line
    assert record.msg == (template if args else line)
    assert CANARY not in f"{record.args} {record.args!r}"
    copied = pickle.loads(pickle.dumps(logging.handlers.QueueHandler(Queue()).prepare(record)))
    assert copied.getMessage() == line


def test_every_logger_of_the_package_is_redacted() -> None:
    for path in Path(pgqueue.__file__).parent.rglob("*.py"):
        made = [
            ast.unparse(node.value)
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "logger"
        ]
        assert made in ([], ["redaction.logger(__name__)"]), path


def test_repr_shows_neither_password_nor_arguments() -> None:
    queue = PgQueue(f"postgresql://app:{CANARY}@db/shop?sslpassword={CANARY}")

    @queue.task(secret_args=["token"])
    def charge(token: str) -> None: ...

    assert CANARY not in f"{queue!r} {charge!r} {charge.job(CANARY)!r} {charge.settings!r}"
    assert repr(queue) == "<PgQueue postgresql+psycopg://app:***@db/shop?sslpassword=***>"
    assert repr(PgQueue()) == "<PgQueue not bound>"


Token = NewType("Token", Secret[str])


@dataclass
class Card:
    number: Secret[str]
    spare: "Card | None" = None


class Keys(TypedDict, total=False):
    signing: NotRequired[Secret[str]]


@dataclass
class Leaf:
    leaves: "list[Leaf]"


@pytest.mark.parametrize(
    "annotation",
    [
        Token,
        Card,
        list[Card],
        Keys | None,
        Secret[str],
        Secret[str] | None,
        list[Secret[str]],
        dict[str, Secret[str] | None],
        Secret[Keys],
        Annotated[Secret[str], "as the bank gave it"],
    ],
)
def test_an_argument_is_secret_by_its_annotation(annotation: Any) -> None:
    def charge(
        amount: Annotated[int, "in cents"], tree: Leaf, token: Any, *, others: list[str]
    ) -> None: ...

    charge.__annotations__["token"] = annotation

    task = PgQueue().task(secret_args=("others",))(charge)

    assert sorted(task.settings.secret_args) == ["others", "token"]
    assert sorted(task.options(priority=0).settings.secret_args) == ["others", "token"]


def test_a_renamed_argument_is_secret_by_each_of_its_names() -> None:
    def charge(token: str, amount: str) -> None: ...

    renamed = {"key": "token", "password": "token", "sum": "amount"}
    task = PgQueue().task(secret_args=["key"], renamed=renamed)(charge)

    assert sorted(task.settings.secret_args) == ["key", "password", "token"]


def test_a_record_whose_types_only_its_own_library_can_find_is_read_as_it_is_written() -> None:
    class Branch(pydantic.BaseModel):
        branches: "list[Branch]"

    class Purse(pydantic.BaseModel):
        purses: "list[Purse]"
        number: "Secret[str]"

    def keep(branch: Any, purse: Any) -> None: ...

    keep.__annotations__.update(branch=Branch, purse=Purse)

    assert PgQueue().task(keep).settings.secret_args == ("purse",)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs Python 3.12")
def test_an_argument_is_secret_by_the_alias_of_its_type() -> None:
    names: dict[str, Any] = {"Secret": Secret}
    exec("type Chain = tuple[Secret[str], Chain] | None\ntype Plain = list[Plain]", names)

    assert is_secret(names["Chain"])
    assert not is_secret(names["Plain"])


def test_a_secret_argument_has_to_be_one_of_the_task() -> None:
    queue = PgQueue()

    with pytest.raises(TaskDefinitionError, match="secret_args names 'tokne'"):

        @queue.task(secret_args=("tokne",))
        def charge(token: str) -> None: ...

    for wrong in ("token", 7, [7]):
        with pytest.raises(OptionError, match="give the names of parameters"):
            queue.task(secret_args=wrong)(lambda token: None)  # type: ignore[arg-type]


class Signature(TypedDict):
    raw: bytes


@dataclass
class Account:
    opened: date
    balances: dict[str, int]


@pytest.mark.parametrize(
    ("annotation", "named"),
    [
        (Secret[bytes], "bytes"),
        (Secret[date], "date"),
        (Secret[datetime] | None, "datetime"),
        (list[Secret[timedelta]], "timedelta"),
        (Secret[dict[str, str]], "dict"),
        (Secret[list[Account]], "date"),
        (Secret[Signature], "bytes"),
    ],
)
def test_a_secret_that_errors_quote_in_other_forms_is_refused(annotation: Any, named: str) -> None:
    def charge(token: Any) -> None: ...

    charge.__annotations__["token"] = annotation

    with pytest.raises(TaskDefinitionError, match=f"'token' has values of the type {named}"):
        PgQueue().task(charge)
    charge.__annotations__["token"] = {Secret[bytes]: bytes}.get(annotation, date)
    with pytest.raises(TaskDefinitionError, match="'token' has values of the type"):
        PgQueue().task(secret_args=("token",))(charge)


@pytest.mark.parametrize("words", ["'{}' is not valid", "parameters: {}", "row contains ({}...)"])
def test_a_long_secret_that_was_shortened_is_masked(words: str) -> None:
    token = "".join(f"{n:x}'" for n in range(400))
    for quoted in (token[:64], repr(token)[:150] + " ... " + repr(token)[-150:], token[-20:]):
        seen = redacted(words.format(quoted), [token])

        assert not any(token[at : at + 16] in seen for at in range(len(token) - 16)), seen
        assert MASK in seen
