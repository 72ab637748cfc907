"""Limits as values: names, keys, and what is refused."""

from datetime import timedelta
from typing import Any

import pytest

from pgqueue import Limit, PgQueue, Secret
from pgqueue.errors import OptionError, TaskDefinitionError
from pgqueue.rules.limits import SEPARATOR, LimitKeys, name_of


def keys_of(queue: PgQueue, name: str, *args: Any) -> list[str]:
    keys = queue.tasks[name].job(*args).limit_keys
    return [] if keys is None else keys.split(SEPARATOR)


def test_a_limit_is_named_by_its_task_its_arguments_or_its_queue() -> None:
    queue = PgQueue(queue_limits={"mail": Limit(9)})

    @queue.task(name="send", queue="mail", limit=(Limit(5), Limit(2, by=("tenant", "kind"))))
    def send(tenant: int, kind: str = "letter") -> None: ...

    assert keys_of(queue, "send", 7) == ["queue:mail", "send", 'send:tenant+kind [7,"letter"]']
    assert sorted(queue.limited.limits) == ["queue:mail", "send", "send:tenant+kind"]


def test_the_queue_of_an_enqueue_decides_about_the_limit_of_the_queue() -> None:
    queue = PgQueue(queue_limits={"mail": Limit(9)})

    @queue.task(name="send")
    def send() -> None: ...

    assert send.job().limit_keys is None
    assert send.options(queue="mail").job().limit_keys == "queue:mail"


def test_tasks_share_a_limit_by_its_name_though_their_parameters_differ() -> None:
    queue = PgQueue()

    @queue.task(name="pay", limit=Limit(2, by="account", name="bank"))
    def pay(account: int) -> None: ...

    @queue.task(name="book", limit=Limit(2, by="to", name="bank"))
    def book(to: int) -> None: ...

    assert keys_of(queue, "pay", 7) == keys_of(queue, "book", 7) == ["bank [7]"]


def test_a_secret_or_long_argument_is_in_the_key_as_a_digest() -> None:
    queue = PgQueue()

    @queue.task(name="login", limit=Limit(1, by="token"))
    def login(token: Secret[str]) -> None: ...

    @queue.task(name="note", limit=Limit(1, by="words"))
    def note(words: str) -> None: ...

    [secret] = keys_of(queue, "login", "hunter2")
    [long] = keys_of(queue, "note", "word " * 50)

    assert "hunter2" not in secret
    assert secret.startswith("login:token sha256:")
    assert long.startswith("note:words sha256:")
    assert keys_of(queue, "login", "hunter3") != [secret]


def test_a_key_of_meta_makes_a_key_whose_value_is_null_without_it() -> None:
    queue = PgQueue(queue_limits={"mail": Limit(9, by="meta.tenant")})
    at_night: dict[str, Any] = {}
    queue.on_enqueue(lambda task: at_night)

    @queue.task(name="send", queue="mail", limit=Limit(2, by=("meta.tenant", "kind")))
    def send(kind: str = "letter") -> None: ...

    def keys(meta: dict[str, Any]) -> Any:
        return send.options(meta=meta).job().limit_keys

    both = 'queue:mail:meta.tenant [{0}]\nsend:meta.tenant+kind [{0},"letter"]'
    assert keys({"tenant": 7, "by": "Ada"}) == both.format(7)
    assert keys({"by": "Ada"}) == send.job().limit_keys == both.format("null")
    at_night["tenant"] = 8
    assert keys({}) == both.format(8), "what on_enqueue adds counts too"


@pytest.mark.parametrize("value", ["a b", "line\nbreak", 'quo"te', "ключ", None, [1, 2]])
def test_any_argument_makes_one_key_of_its_name(value: Any) -> None:
    limit = Limit(1, by="value").named("task")

    keys = LimitKeys((limit, Limit(1).named("other"))).of({"value": value}, {})

    assert keys is not None
    [_, key] = keys.split(SEPARATOR)
    assert name_of(key) == "task:value"


NUMBER: Any = 3
WRONG: Any = Limit
DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Limit(-1), "capacity is -1; give a whole number from 0"),
        (lambda: Limit(True), "capacity is True; give a whole number"),
        (lambda: WRONG(1.5), "capacity is 1.5; give a whole number"),
        (lambda: WRONG(1, by=3), "by is 3; give the name of a parameter"),
        (lambda: Limit(1, name="two words"), "name of a limit is 'two words'"),
        (lambda: Limit(1, name=""), "name of a limit is ''"),
        (lambda: WRONG(1, order="fifo"), "order is 'fifo'; give any or strict"),
        (lambda: Limit(2, order="strict"), "one job at a time, and the capacity is 2"),
        (lambda: WRONG(1, order="strict", failed_head="drop"), "give block or skip"),
        (lambda: Limit(1, failed_head="skip"), "failed_head is for order='strict'"),
        (lambda: WRONG(1, per=60), "per is 60; give a timedelta .* as in per=timedelta"),
        (lambda: Limit(1, per=timedelta()), "per is .*; give a timedelta from 0:00:00.001000"),
        (lambda: Limit(1, burst=2), "burst is for a rate; give per"),
        (lambda: Limit(1, per=DAY, burst=0), "burst is 0; give a whole number from 1"),
        (lambda: Limit(1, per=DAY, burst=10**6), "give a smaller burst: .* at most 36525 days"),
        (lambda: Limit(1, per=DAY, order="strict"), "jobs at once, not for a rate"),
        (lambda: PgQueue(queue_limits={"mail": (Limit(1), Limit(2))}), "one limit of jobs at once"),
        (lambda: PgQueue(queue_limits={"mail": NUMBER}), "queue mail: 3 is not a Limit"),
        (lambda: PgQueue(queue_limits=NUMBER), "give a dict by names of queues"),
        (lambda: PgQueue(queue_limits={"a b": Limit(5)}), "queue is 'a b'"),
        (lambda: PgQueue(queue_limits={"mail": Limit(5, by="x")}), "give the tasks a Limit"),
        (lambda: PgQueue(queue_limits={"mail": Limit(5, by="meta.")}), "give a key of meta behind"),
    ],
)
def test_a_wrong_limit_is_refused(make: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make()


def test_a_rate_has_a_name_of_its_own_beside_a_limit_of_the_same_task_and_queue() -> None:
    queue = PgQueue(queue_limits={"mail": (Limit(9), Limit(9, per=DAY))})

    @queue.task(name="send", queue="mail", limit=(Limit(5), Limit(2, by="tenant", per=DAY)))
    def send(tenant: int) -> None: ...

    assert set(queue.limited.limits) == {
        "queue:mail",
        "queue:mail:rate",
        "send",
        "send:tenant:rate",
    }
    assert queue.limited.queues == {"mail"}


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ((Limit(1), Limit(2)), "two of its limits are named 'send'"),
        (tuple(Limit(1, name=f"n{n}") for n in range(5)), "5 limits; give at most 4"),
        (
            Limit(1, by="meta"),
            "by 'meta', which is not .* name tenant, a key of meta as meta.tenant",
        ),
        (Limit(1, by="meta.pgqueue.batch"), "which does not begin with pgqueue."),
    ],
)
def test_a_wrong_limit_of_a_task_is_refused_where_the_task_is_declared(
    limit: Any, words: str
) -> None:
    queue = PgQueue()

    def send(tenant: int) -> None: ...

    with pytest.raises((OptionError, TaskDefinitionError), match=words):
        queue.task(name="send", limit=limit)(send)
    assert queue.tasks == {}


def test_two_limits_of_one_name_must_agree() -> None:
    queue = PgQueue(queue_limits={"mail": Limit(3, name="bank")})

    def pay() -> None: ...

    with pytest.raises(TaskDefinitionError, match="'bank' is declared twice and differently"):
        queue.task(name="pay", limit=Limit(2, name="bank"))(pay)


def test_a_task_for_failed_jobs_has_no_limit() -> None:
    queue = PgQueue()

    @queue.task(name="mourn", limit=Limit(1))
    def mourn(job_id: int) -> None: ...

    with pytest.raises(TaskDefinitionError, match="mourn, which is under a limit"):

        @queue.task(name="pay", on_failed=mourn)
        def pay() -> None: ...
