"""Types of the application as arguments: ``PgQueue(encoders=...)``."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from pgqueue import (
    ArgumentsError,
    Job,
    OptionError,
    PayloadError,
    PgQueue,
    Secret,
    TaskDefinitionError,
    Worker,
)


class Money:
    def __init__(self, cents: int, currency: str) -> None:
        if not isinstance(cents, int):
            raise TypeError("cents")
        self.cents, self.currency = cents, currency

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]  # not needed


class Gift(Money): ...


@dataclass
class Order:
    total: Money


ENCODERS: Any = {
    Money: (lambda money: [money.cents, money.currency], lambda stored: Money(*stored)),
    PurePosixPath: (str, PurePosixPath),
}


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine, encoders=ENCODERS)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_values_arrive_as_they_were(queue: PgQueue, executor: Any) -> None:
    @queue.task(name="pay", executor=executor)
    def pay(order: Order, parts: list[Money], to: PurePosixPath | None = None) -> bool:
        assert order == Order(Money(7, "EUR"))
        assert parts == [Money(3, "EUR"), Money(4, "EUR")]
        return to == PurePosixPath("a/b")

    total = Order(Money(7, "EUR"))
    job = pay.delay(total, [Money(3, "EUR"), Money(4, "EUR")], to=PurePosixPath("a/b"))

    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}
    with queue.session() as session:
        stored = session.get_one(Job, job.id)
        assert stored.result is True
        assert stored.args["order"] == {"total": [7, "EUR"]}


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (7, ArgumentsError, "argument amount must be a Money, not int"),
        (Gift(7, "EUR"), ArgumentsError, "must be a Money, not Gift"),
        (Money(7, object()), ArgumentsError, r"argument amount\[1\] must be plain JSON"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_such_value_is_refused_at_the_enqueue(
    queue: PgQueue, value: Any, error: type[Exception], words: str
) -> None:
    @queue.task(name="pay")
    def pay(amount: Money) -> None: ...

    with pytest.raises(error, match=words):
        pay.job(value)


def test_an_encoder_that_raises_refuses_the_value(engine: Engine) -> None:
    def raises(_value: Any) -> Any:
        raise KeyError("secret")

    queue = PgQueue(engine, encoders={Money: (raises, raises)})

    @queue.task(name="pay")
    def pay(amount: Money) -> None: ...

    with pytest.raises(PayloadError, match="cannot be written as a Money: its encoder raised Key"):
        pay.job(Money(7, "EUR"))
    with pytest.raises(PayloadError, match="cannot be read as a Money: its encoder raised KeyErr"):
        pay.payload.loads('{"amount": [7, "EUR"]}')


def test_a_type_without_an_encoder_is_refused_with_the_way_out(engine: Engine) -> None:
    def pay(amount: Money) -> None: ...

    with pytest.raises(TaskDefinitionError, match=r"Money, .* with PgQueue\(encoders=\.\.\.\)"):
        PgQueue(engine).task(pay)


def test_a_secret_of_such_a_type_is_refused(queue: PgQueue) -> None:
    def pay(amount: Secret[Money]) -> None: ...

    with pytest.raises(TaskDefinitionError, match="Money, which errors quote in forms"):
        queue.task(pay)


@pytest.mark.parametrize(
    ("encoders", "words"),
    [
        ([Money], "give a dict by types"),
        ({"Money": (str, str)}, "give a type of your own"),
        ({datetime: (str, str)}, "the types of Python are stored without an encoder"),
        ({Money: str}, r"give two functions: \(to_json, from_json\)"),
        ({Money: (str, 7)}, "give two functions"),
    ],
)
def test_wrong_encoders_are_refused(encoders: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        PgQueue(encoders=encoders)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (UUID(int=7), r"UUID, or list\[UUID\]"),
        ([UUID(int=7)], r"UUID, or list\[UUID\]"),
        ((1, "a"), r"tuple\[int, str\]"),
        ({"a"}, r"set\[str\]"),
        (date(2030, 1, 1), "date, or"),
        (datetime(2030, 1, 1, tzinfo=UTC), "datetime, or"),
        (time(1), "time, or"),
        (timedelta(1), "timedelta, or"),
        (Decimal(1), "Decimal, or"),
        (b"a", "bytes, or"),
    ],
)
def test_a_value_that_needs_an_annotation_is_refused_with_it(value: Any, annotation: str) -> None:
    def send(to) -> None: ...  # type: ignore[no-untyped-def]

    task = PgQueue().task(send)

    with pytest.raises(ArgumentsError, match=f"with the type it has, as {annotation}"):
        task.job(value)
