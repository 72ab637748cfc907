"""A filter as a line of text: what it says, what it refuses, and that it survives."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue import JobStatus
from pgqueue.errors import OptionError
from pgqueue.filter_line import FORMS, line_of, parse
from pgqueue.repository.conditions import (
    RANGES,
    WRITTEN,
    Conditions,
    JobConditions,
    JobFilter,
    ValueKind,
)

ROOT = Path(__file__).parents[1]
FAILED = frozenset({JobStatus.FAILED})


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("", {}),
        ("task:send queue:mail tag:vip batch:12",
         {"task": "send", "queue": "mail", "tag": "vip", "batch": 12}),
        ("limit:account:7 key:abc", {"limit_key": "account:7", "unique_key": "abc"}),
        ("status:failed status:cancelled", {"statuses": FAILED | {JobStatus.CANCELLED}}),
        ("status:due", {"statuses": frozenset({JobStatus.PENDING}), "are_due": True}),
        ("arg.order_id:42 arg.name:Ada", {"args": (("order_id", 42), ("name", "Ada"))}),
        ('arg.code:"42" arg.is_new:true', {"args": (("code", "42"), ("is_new", True))}),
        ("error:timeout", {"text": "timeout"}),
        ("error:00000000000000ff", {"error": 255}),
        ('error:"00000000000000ff"', {"text": "00000000000000ff"}),
        (r'error:"a \"word\" \\ more"', {"text": 'a "word" \\ more'}),
        ("created:>2h", {"created_after": timedelta(hours=2)}),
        ("created:<2026-11-22T14:00Z",
         {"created_before": datetime(2026, 11, 22, 14, tzinfo=UTC)}),
        ("created:>2026-11-22", {"created_after": datetime(2026, 11, 22, tzinfo=UTC)}),
        ("attempts:3", {"attempts": 3}),
        ("took:>500ms", {"took": timedelta(milliseconds=500)}),
    ],
)  # fmt: skip
def test_the_words_set_the_conditions(line: str, fields: dict[str, Any]) -> None:
    assert parse(line) == JobFilter(**fields)


def test_a_number_alone_is_a_job() -> None:
    assert parse(" 4711 ") == 4711


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("colour:red", "'colour:red'; its words are task, queue"),
        ("task:a task:b", "task: twice"),
        ("status:gone", "its words are pending"),
        ("status:due status:failed", "one status only"),
        ("task", "'task'; its words are"),
        ('task:"open', "its words are"),
        ("arg:7", "its words are"),
        ("task.name:7", "its words are"),
        ("batch:x", "not the id of batch"),
        ("attempts:0", "from 1 to 32767"),
        ("attempts:99999", "from 1 to 32767"),
        (f"attempts:{'0' * 20}99999", "from 1 to 32767"),
        ("took:>soon", "write took:>10s"),
        ("created:>soon", "write created:>2h"),
        ("created:2h", "its words are"),
        ("created:>1999-01-01", "between the years"),
        ("created:>999999999d", "is not understood"),
        ("9" * 30, "not the id of a job"),
        ("task:" + "x" * 1000, "more than 1000 bytes"),
        ("task:a\0", "NUL"),
    ],
)
def test_what_no_filter_has_is_refused_with_the_words_that_are_known(line: str, words: str) -> None:
    with pytest.raises(OptionError, match=words.replace("(", r"\(")):
        parse(line)


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
NAMES = st.from_regex("[a-z_]{1,8}", fullmatch=True)
SPANS = st.integers(1, 10**7).map(lambda seconds: timedelta(seconds=seconds))
TIMES = st.datetimes(
    datetime(2000, 1, 2), datetime(9998, 12, 30), timezones=st.just(timezone(timedelta(hours=2)))
)
IDS = st.none() | st.integers(1, 2**63 - 1)
VALUES = (
    TEXTS
    | st.integers()
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False, allow_infinity=False)
)
OF_KIND: dict[ValueKind, st.SearchStrategy[Any]] = {
    **dict.fromkeys([ValueKind.TEXT, ValueKind.PART], st.none() | TEXTS),
    **dict.fromkeys([ValueKind.JOB, ValueKind.BATCH], IDS),
    **dict.fromkeys([ValueKind.SINCE, ValueKind.UNTIL], st.none() | SPANS | TIMES),
    ValueKind.ERROR: st.none() | st.integers(-(2**63), 2**63 - 1),
    ValueKind.SPAN: st.none() | SPANS,
    ValueKind.NUMBER: st.none() | st.integers(*RANGES[ValueKind.NUMBER]),
    ValueKind.ARGUMENTS: st.dictionaries(NAMES, VALUES, max_size=2).map(
        lambda args: tuple(args.items())
    ),
}
FILTERS = st.builds(
    JobFilter,
    statuses=st.frozensets(st.sampled_from(JobStatus)),
    **{name: OF_KIND[each.metadata["kind"]] for name, each in WRITTEN.items()},
)


@given(FILTERS)
def test_a_filter_survives_as_a_line(which: JobFilter) -> None:
    assert parse(line_of(which)) == which


@pytest.mark.parametrize("word", ["due", "scheduled", "retrying"])
def test_the_words_for_parts_of_a_status_survive(word: str) -> None:
    which = parse(f"status:{word}")

    assert isinstance(which, JobFilter)
    assert line_of(which) == f"status:{word}"


@given(st.text(max_size=60) | TEXTS.map(lambda text: f'task:"{text}'))
def test_any_other_text_is_read_or_refused(line: str) -> None:
    with suppress(OptionError):
        parse(line)


def test_the_manual_has_each_word_and_option() -> None:
    manual = (ROOT / "docs/how-to/command-line.md").read_text("utf-8")
    rows = "".join(line for line in manual.splitlines() if line.startswith("| `"))

    for each in WRITTEN.values():
        assert f"`{each.metadata['word']}:" in rows
        assert f"`{each.metadata['option']}" in rows


def test_each_kind_of_condition_is_written_in_a_line() -> None:
    assert FORMS.keys() == {*ValueKind} - {ValueKind.UNWRITTEN}


def test_type_checkers_know_each_condition() -> None:
    assert {*get_type_hints(Conditions)} == {*WRITTEN}
    assert get_type_hints(JobConditions).items() <= get_type_hints(Conditions).items()
