"""Whatever a handler raises or returns, something that can be stored is kept of it."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue import PgQueue
from pgqueue.handler.error_reports import MAX_MESSAGE_BYTES, MAX_TRACEBACK_BYTES, report
from pgqueue.outcomes import ErrorReport


def raised(function: Callable[[], Any]) -> ErrorReport:
    try:
        function()
    except BaseException as error:
        return report(error)
    raise AssertionError("nothing was raised")


def assert_storable(told: ErrorReport) -> None:
    assert len(told.message.encode()) <= MAX_MESSAGE_BYTES
    assert len(told.traceback.encode()) <= MAX_TRACEBACK_BYTES
    assert len(told.type.encode()) <= 500
    assert "\0" not in told.type + told.message + told.traceback


def throw(error: BaseException) -> Callable[[], None]:
    def thrower() -> None:
        raise error

    return thrower


class PaymentRefused(Exception):
    """An error of the application."""


def test_an_error_is_told_by_its_type_message_and_traceback() -> None:
    told = raised(throw(PaymentRefused("no funds")))

    assert told.type == f"{__name__}.PaymentRefused"
    assert told.message == "no funds"
    assert "in thrower\n    raise error\n" in told.traceback
    assert told.traceback.endswith("PaymentRefused: no funds\n")


def test_an_error_of_python_has_a_short_name() -> None:
    assert raised(lambda: 1 / 0).type == "ZeroDivisionError"


def test_local_variables_are_not_told() -> None:
    def pay() -> None:
        card_number = "4111" * 4
        raise PaymentRefused(f"refused, {len(card_number)} digits")

    assert "4111" * 4 not in raised(pay).traceback


def test_causes_notes_and_the_parts_of_a_group_are_told() -> None:
    def fail() -> None:
        try:
            1 / 0  # for the error
        except ZeroDivisionError as error:
            group = ExceptionGroup("both", [KeyError("a"), ExceptionGroup("inner", [OSError("b")])])
            group.add_note("while paying")
            raise group from error

    told = raised(fail).traceback

    assert told.index("ZeroDivisionError") < told.index("direct cause") < told.index("both")
    assert "while paying" in told
    assert "| KeyError: 'a'" in told
    assert "| OSError: b" in told


def test_an_error_while_handling_another_tells_both() -> None:
    def fail() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            raise OSError("second")  # what is under test

    assert "During handling of the above" in raised(fail).traceback


def test_nul_and_half_surrogates_are_replaced() -> None:
    told = raised(throw(ValueError("a\0b\ud800c\udc00d\U0001f600")))

    assert told.message == "a\ufffdb\ufffdc\ufffdd\U0001f600"
    assert_storable(told)


@given(st.text(st.characters(), max_size=200), st.integers(0, 300))
def test_any_message_is_stored_within_its_limit(text: str, times: int) -> None:
    told = report(ValueError(text * times))

    assert_storable(told)
    told.message.encode()


def test_a_long_message_keeps_its_head_and_its_tail() -> None:
    told = report(ValueError("head" + "x" * 1_000_000 + "tail"))

    assert told.message.startswith("head")
    assert told.message.endswith("tail")
    assert "1,000,008 characters in all" in told.message
    assert_storable(told)


def method_raising(error: BaseException) -> Any:
    def method(self: Any) -> str:
        raise error

    return method


@pytest.mark.parametrize(
    "error",
    [RuntimeError("x"), SystemExit(1), KeyboardInterrupt(), RecursionError(), GeneratorExit()],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_cannot_print_itself_is_still_told(error: BaseException) -> None:
    spiteful = type("Spiteful", (Exception,), {"__str__": method_raising(error)})

    told = raised(throw(spiteful()))

    assert told.message == f"(no text: formatting it raised {type(error).__name__})"
    assert "in thrower" in told.traceback


@pytest.mark.parametrize(
    "attributes",
    [
        {"__str__": lambda self: 7},
        {"__str__": lambda self: str(self)},
        {"__cause__": property(method_raising(RuntimeError()))},
        {"__notes__": property(method_raising(RuntimeError()))},
        {"__notes__": 7},
        {"__notes__": ["\0" * 100_000, 7, None]},
        {"__module__": 7},
        {"__qualname__": "x" * 10_000},
    ],
    ids=lambda attributes: next(iter(attributes)),
)
def test_an_odd_error_is_still_told(attributes: dict[str, Any]) -> None:
    odd = type("Odd", (Exception,), attributes)

    told = raised(throw(odd()))

    assert_storable(told)
    assert told.traceback


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        asyncio.CancelledError(),
        StopIteration(1),
        BaseException("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_kind_of_exception_is_told(error: BaseException) -> None:
    assert raised(throw(error)).type.endswith(type(error).__name__)


def test_a_deep_group_is_told_in_bounds() -> None:
    error: Exception = ValueError("innermost")
    for _ in range(1000):
        error = ExceptionGroup("layer", [error, KeyError("x")])

    assert_storable(raised(throw(error)))


def test_a_long_chain_is_told_in_bounds() -> None:
    error = ValueError("last")
    for number in range(1000):
        cause, error = error, ValueError(f"link {number}")
        error.__cause__ = cause

    told = raised(throw(error))

    assert_storable(told)
    assert "link 999" in told.traceback


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first

    assert_storable(raised(throw(first)))


def test_endless_recursion_is_told_from_both_ends() -> None:
    def descend() -> None:
        ascend()

    def ascend() -> None:
        descend()

    told = raised(descend)

    assert told.type == "RecursionError"
    assert told.traceback.startswith("Traceback")
    assert told.traceback.endswith("RecursionError: maximum recursion depth exceeded\n")
    assert_storable(told)


def test_the_frames_before_the_handler_are_left_out() -> None:
    pay = PgQueue().task(throw(PaymentRefused("no funds")))

    with pytest.raises(PaymentRefused) as caught:
        pay()
    ours = caught.tb.tb_next
    told = report(caught.value.with_traceback(ours))

    assert "in thrower" in told.traceback
    assert "/pgqueue/tasks/" not in told.traceback


def test_a_secret_of_several_lines_is_masked_in_a_group_too() -> None:
    secret = "-----BEGIN KEY-----\nMIIEpAIBAAKCAQEA\n-----END KEY-----"

    told = report(ExceptionGroup("two", [ValueError(f"bad key {secret}")]), secrets=[secret])

    assert "MIIEpAIBAAKCAQEA" not in told.traceback


class Shop:
    """An application whose functions call each other."""

    def sell(self, depth: int) -> Any:
        return self.sell(depth - 1) if depth else self.parse(f"<{depth}>")

    def parse(self, words: str) -> Any:
        return json.loads(words)


class TestPlace:
    def test_the_place_names_the_functions_of_the_application_from_the_handler_inwards(
        self,
    ) -> None:
        told = raised(lambda: Shop().sell(0))

        *_, sell, parse = told.place.split(" > ")
        assert sell == f"{__name__}:Shop.sell"
        assert parse == f"{__name__}:Shop.parse"

    def test_neither_values_nor_lines_nor_the_depth_of_a_recursion_change_the_fingerprint(
        self,
    ) -> None:
        def handler(depth: int) -> ErrorReport:
            return raised(lambda: Shop().sell(depth))

        assert handler(0).message == handler(3).message
        assert handler(0).traceback != handler(3).traceback
        assert handler(0).fingerprint == handler(3).fingerprint

    def test_another_type_and_another_place_have_another_fingerprint(self) -> None:
        def pay(error: Exception) -> ErrorReport:
            return raised(throw(error))

        def refund(error: Exception) -> None:
            raise error

        found = {
            pay(ValueError("a")).fingerprint,
            pay(ValueError("b")).fingerprint,
            pay(KeyError("a")).fingerprint,
            raised(lambda: refund(ValueError("a"))).fingerprint,
        }

        assert len(found) == 3

    def test_an_error_that_was_never_raised_has_no_place(self) -> None:
        assert report(TimeoutError("late")).place == ""
