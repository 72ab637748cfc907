"""Unique keys made of arguments: equal arguments have equal keys, and a key shows no argument."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, text

from pgqueue import PgQueue, Secret, TaskDefinitionError, Unique
from pgqueue.arguments.text import canonical_text

queue = PgQueue()

numbers = st.integers(-3, 3) | st.sampled_from(
    [0.0, -0.0, 1.0, 1.5, 1e16, 1e22, -2.0, 2**53 + 1, 1e-7]
)
leaves = (
    st.none()
    | st.booleans()
    | numbers
    | st.sampled_from(["", "1", "a", "é", "\u2028", "\U0001f600", '"\\/\x7f\n'])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["a", "b", "é"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


def key_of(task: Any, *args: Any, **kwargs: Any) -> Any:
    return task.job(*args, **kwargs).unique_key


def in_other_words(value: Any) -> Any:
    """The same JSON value, written with other numbers and in another order."""
    if isinstance(value, dict):
        return {name: in_other_words(value[name]) for name in reversed(value)}
    if isinstance(value, list):
        return [in_other_words(each) for each in value]
    if type(value) is int and abs(value) < 2**53:
        return float(value)
    return value


@given(one=values, other=values)
def test_two_values_have_the_same_text_exactly_if_jsonb_counts_them_as_equal(
    connection: Connection, one: Any, other: Any
) -> None:
    is_equal = text("SELECT CAST(:one AS jsonb) = CAST(:other AS jsonb)")
    for second in (other, in_other_words(one)):
        pair = {"one": json.dumps(one), "other": json.dumps(second)}
        equal = connection.scalar(is_equal, pair)
        assert equal == (canonical_text(one) == canonical_text(second)), pair


@given(one=values)
def test_sql_and_python_write_the_same_text(connection: Connection, one: Any) -> None:
    in_sql = text("SELECT pgqueue.canonical_text(CAST(:one AS jsonb))")

    for each in (one, in_other_words(one)):
        assert connection.scalar(in_sql, {"one": json.dumps(each)}) == canonical_text(each)


@given(
    one=st.tuples(st.integers(0, 2), st.sets(st.integers(0, 3)), st.sampled_from(["", "x"])),
    other=st.tuples(st.integers(0, 2), st.sets(st.integers(0, 3)), st.sampled_from(["", "x"])),
)
def test_equal_arguments_have_equal_keys_and_others_have_others(one: Any, other: Any) -> None:
    @queue.task(name="tests.equal", unique=Unique())
    def equal(n: int, among: set[int], word: str = "x") -> None: ...

    assert (key_of(equal, *one) == key_of(equal, *other)) == (one == other)
    queue.tasks.pop("tests.equal", None)


def test_a_default_counts_as_the_same_argument_given() -> None:
    @queue.task(name="tests.default", unique=Unique())
    def default(n: int, at: datetime = datetime(2030, 1, 1, tzinfo=UTC), m: int = 1) -> None: ...

    assert key_of(default, 1) == key_of(default, n=1, m=1)
    assert key_of(default, 1) == key_of(default, 1, datetime(2030, 1, 1, tzinfo=UTC))
    assert key_of(default, 1) != key_of(default, 1, m=2)


def test_a_default_that_no_caller_could_give_counts_as_itself() -> None:
    @queue.task(name="tests.sloppy", unique=Unique())
    def sloppy(n: int, m: int = "many") -> None: ...  # type: ignore[assignment]  # on purpose

    assert key_of(sloppy, 1) == key_of(sloppy, 1)
    assert key_of(sloppy, 1) != key_of(sloppy, 1, 2)


def test_only_the_chosen_arguments_count_and_their_order_does_not() -> None:
    @queue.task(name="tests.some", unique=Unique(by=("b", "a")))
    def some(a: int, b: int, c: int) -> None: ...

    assert key_of(some, 1, 2, 3) == key_of(some, 1, 2, 4)
    assert key_of(some, 1, 2, 3) != key_of(some, 2, 1, 3)
    assert key_of(some, 1, 2, 3).startswith("tests.some(a,b):")
    same = some.options(unique=Unique(by=("a", "b")))
    assert key_of(same, 1, 2, 3) == key_of(some, 1, 2, 3)


def test_one_name_needs_no_tuple() -> None:
    assert Unique(by="customer_id") == Unique(by=("customer_id",))


def test_without_arguments_a_task_has_one_key() -> None:
    @queue.task(name="tests.single", unique=Unique(by=()))
    def single(n: int) -> None: ...

    assert key_of(single, 1) == key_of(single, 2) == "tests.single()"


def test_two_tasks_with_equal_arguments_have_different_keys() -> None:
    @queue.task(name="tests.one", unique=Unique())
    def one(n: int) -> None: ...

    @queue.task(name="tests.other", unique=Unique())
    def other(n: int) -> None: ...

    assert key_of(one, 1) != key_of(other, 1)


def test_a_key_shows_no_argument() -> None:
    @queue.task(name="tests.secret", unique=Unique())
    def secret(token: Secret[str], who: str) -> None: ...

    key = key_of(secret, "hunter2", "Ada")

    assert "hunter2" not in key
    assert "Ada" not in key


def test_an_own_key_is_stored_as_it_is_and_may_be_left_out() -> None:
    @queue.task(name="tests.own", unique=Unique(key=lambda n: f"k{n}" if n else None))
    def own(n: int) -> None: ...

    assert key_of(own, 1) == "k1"
    assert key_of(own, 0) is None
    assert key_of(own.options(unique=Unique(key="fixed")), 1) == "fixed"
    assert key_of(own.options(unique_key="short form"), 1) == "short form"
    assert key_of(own.options(unique=None), 1) is None


def test_an_unknown_name_is_refused_where_the_task_is_declared() -> None:
    with pytest.raises(TaskDefinitionError, match=r"by has 'customer'.*it may name n"):

        @queue.task(name="tests.unknown", unique=Unique(by=("customer",)))
        def unknown(n: int) -> None: ...
