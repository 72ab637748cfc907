"""A call is bound to its parameters, and many calls are written at once."""

import json
from typing import Any

import pytest
from payloads import payload_for, payload_of

from pgqueue.errors import ArgumentsError, PayloadError


def greet(session: Any, user_id: int, greeting: str = "hello", *, loud: bool = False) -> None: ...


def test_arguments_are_named_and_injected_ones_left_out() -> None:
    payload = payload_of(greet, injected=1)

    assert payload.names == ("user_id", "greeting", "loud")
    assert payload.bind((7,), {}) == {"user_id": 7}
    assert payload.bind((7, "hi"), {"loud": True}) == {"user_id": 7, "greeting": "hi", "loud": True}
    assert payload.bind((), {"user_id": 7}) == {"user_id": 7}


def test_defaults_are_added_only_when_asked_for() -> None:
    payload = payload_of(greet, injected=1)

    assert payload.with_defaults({"user_id": 7}) == {
        "user_id": 7,
        "greeting": "hello",
        "loud": False,
    }
    assert payload.loads('{"user_id": 7}') == {"user_id": 7}


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "missing a required argument: 'user_id'"),
        ((1, "a", True), {}, "too many positional arguments"),
        ((1,), {"user_id": 1}, "multiple values for argument 'user_id'"),
        ((1,), {"volume": 1}, "it has no argument 'volume'"),
        ((1,), {"priority": 1}, "an option goes there: .options(priority=...)"),
        ((), {"greeting": "x"}, "missing a required argument: 'user_id'"),
        ((1,), {7: 1}, "keywords must be strings"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_as_python_would(
    args: tuple[Any, ...], kwargs: dict[Any, Any], said: str
) -> None:
    payload = payload_of(greet, injected=1)

    with pytest.raises(ArgumentsError) as refused:
        payload.bind(args, kwargs)

    assert said in str(refused.value)
    assert "task mail.welcome" in str(refused.value)
    assert "(user_id, greeting=..., loud=...)" in str(refused.value)


def test_many_calls_become_one_array() -> None:
    payload = payload_of(greet, injected=1)

    encoded = payload.encode_many({"user_id": number} for number in range(3))

    assert payload.dumps_many(encoded) == '[{"user_id":0},{"user_id":1},{"user_id":2}]'


def test_a_large_batch_of_small_calls_is_not_too_large() -> None:
    payload = payload_for(str)
    encoded = [{"value": "x" * 400}] * 2000

    assert json.loads(payload.dumps_many(encoded)) == encoded


@pytest.mark.parametrize("bad", ["a\0b", "\ud800", "x" * 300_000])
@pytest.mark.parametrize("size", [3, 2000])
def test_the_bad_call_of_a_batch_is_named(bad: str, size: int) -> None:
    payload = payload_for(str)
    encoded = [{"value": "x" * 200} for _ in range(size)]
    encoded[size - 2] = {"value": bad}

    with pytest.raises(PayloadError, match=rf"value.*call {size + 8} of the batch"):
        payload.dumps_many(encoded, first_index=10)


def test_the_call_of_a_batch_with_a_wrong_type_is_named() -> None:
    payload = payload_for(int)

    with pytest.raises(ArgumentsError, match=r"argument value .*call 1 of the batch"):
        payload.encode_many([{"value": 1}, {"value": "1"}])
