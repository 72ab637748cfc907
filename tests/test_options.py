import re
from dataclasses import Field
from datetime import timedelta
from typing import Any, get_type_hints

import pytest
from sqlalchemy.orm import Session

from pgqueue import (
    OptionError,
    PgQueue,
    PgQueueError,
    TaskDefinitionError,
    UnknownOption,
    Worker,
)
from pgqueue.options import (
    ELSEWHERE,
    OPTIONS,
    OPTIONS_OF_WORKER,
    JobOptions,
    Options,
    OptionsOfWorker,
    TaskOptions,
    WorkerOptions,
)

OF_TASK = Options(task="t", timeout=timedelta(minutes=5))


def test_type_checkers_know_the_declared_options_and_no_others() -> None:
    of_task = {each.name for each in OPTIONS if "task" in each.metadata["is_for"]}
    of_enqueue = {each.name for each in OPTIONS if "enqueue" in each.metadata["is_for"]}

    assert TaskOptions.__annotations__.keys() == of_task | {"name"}
    assert JobOptions.__annotations__.keys() == of_enqueue
    assert WorkerOptions.__annotations__.keys() == {each.name for each in OPTIONS_OF_WORKER} - {
        "queues"
    }


def test_type_checkers_know_the_declared_types() -> None:
    narrower = {"name", "unique_key", "on_failed", "on_success", "keep"}

    for of, declarations in (
        (TaskOptions, Options),
        (JobOptions, Options),
        (WorkerOptions, OptionsOfWorker),
    ):
        declared = get_type_hints(declarations)
        types = {name: kind for name, kind in get_type_hints(of).items() if name not in narrower}
        assert types == {name: declared[name] for name in types}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda each: each.name)
def test_every_option_refuses_what_no_option_takes(option: Field[Any]) -> None:
    task, plain = PgQueue().task, PgQueue().task(print_nothing)
    is_for_enqueue = option.metadata["is_for"] == "enqueue"
    wrong: dict[str, Any] = {option.name: object()}

    with pytest.raises((OptionError, TaskDefinitionError), match=rf"task .*{option.name} .*; "):
        _ = plain.options(**wrong) if is_for_enqueue else task(**wrong)(print_nothing)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_option_of_another_queue_is_answered_by_what_does_its_work_here(name: str) -> None:
    task, plain = PgQueue().task, PgQueue().task(print_nothing)
    foreign: dict[str, Any] = {name: 1}
    words = re.escape(f"there is no option {name!r}; {ELSEWHERE[name]}")

    with pytest.raises(UnknownOption, match=words):
        task(**foreign)(print_nothing)
    with pytest.raises(UnknownOption, match=words):
        plain.options(**foreign)


@pytest.mark.parametrize("name", ["depends_on", "ignore_result", "link_error", "job_id", "ttl"])
def test_an_option_of_another_queue_is_not_answered_by_a_word_that_looks_like_it(name: str) -> None:
    plain = PgQueue().task(print_nothing)
    foreign: dict[str, Any] = {name: 1}

    with pytest.raises(UnknownOption) as refused:
        plain.options(**foreign)

    assert "did you mean" not in str(refused.value)
    assert "known are" not in str(refused.value)


@pytest.mark.parametrize("option", OPTIONS_OF_WORKER, ids=lambda each: each.name)
def test_every_option_of_a_worker_refuses_what_no_option_takes(option: Field[Any]) -> None:
    wrong: dict[str, Any] = {option.name: object()}

    with pytest.raises(OptionError, match=rf"^{option.name} is .*; give "):
        Worker(PgQueue(), **wrong)


def test_an_option_that_no_worker_has_is_refused() -> None:
    misspelt: dict[str, Any] = {"concurency": 3}

    with pytest.raises(UnknownOption, match="no option 'concurency'; did you mean 'concurrency'"):
        Worker(PgQueue(), **misspelt)


class Unspeakable:
    def __repr__(self) -> str:
        raise LookupError("no words")


@pytest.mark.parametrize(
    "value", [Unspeakable(), "x" * 10**6, 10**6000], ids=["no repr", "long", "many digits"]
)
def test_a_refusal_shows_any_value_within_bounds(value: Any) -> None:
    queue = PgQueue()
    task = queue.task(print_nothing)
    for refused in (
        lambda: task.options(priority=value),
        lambda: task.options(queue=value),
        lambda: Worker(queue, concurrency=value),
        lambda: Worker(queue, [value]),
        lambda: queue.cancel(Session(), value),
        lambda: queue.pause(Session(), value),
    ):
        with pytest.raises(PgQueueError) as refusal:
            refused()
        assert len(str(refusal.value)) < 2100


def print_nothing() -> None: ...


@pytest.mark.parametrize(
    ("meta", "timeout"),
    [
        (None, timedelta(minutes=5)),
        ('{"pgqueue.timeout": 1.5}', timedelta(seconds=1.5)),
        ('{"pgqueue.timeout": null}', None),
        ('{"by": "Ada"}', timedelta(minutes=5)),
        *(
            (by_hand, timedelta(minutes=5))
            for by_hand in (
                '{"pgqueue.timeout": "soon"}',
                '{"pgqueue.timeout": 1e999}',
                '{"pgqueue.timeout": 1e11}',
                '{"pgqueue.timeout": -1}',
                '{"pgqueue.timeout": [1]}',
                '{"of": {"pgqueue.timeout": 1}}',
                '["pgqueue.timeout"]',
                f'{"[" * 100_000}"pgqueue.timeout"{"]" * 100_000}',
            )
        ),
    ],
)
def test_a_job_has_the_option_of_its_meta_or_that_of_its_task(
    meta: str | None, timeout: timedelta | None
) -> None:
    assert OF_TASK.as_enqueued(meta).timeout == timeout
