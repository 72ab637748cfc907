"""A retry policy decides whether a failed attempt is followed by another, and when."""

import itertools
import json
import logging
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue.errors import OptionError
from pgqueue.options import Options
from pgqueue.outcomes import AttemptEnd, ErrorReport, Failed, Retried
from pgqueue.rules.retry import DEFAULT_RETRY, MAX_DELAY, Retry

REPORT = ErrorReport("ValueError", "x", "")
SECOND = timedelta(seconds=1)


def after(
    policy: Retry,
    *,
    attempt: int = 1,
    max_attempts: int = 32767,
    error: BaseException | None = None,
    end: AttemptEnd = AttemptEnd.FAILED,
    random: Callable[[], float] = lambda: 1.0,
) -> Retried | Failed:
    return policy.after_failure(
        attempt=attempt,
        max_attempts=max_attempts,
        error=error or ValueError("x"),
        report=REPORT,
        end=end,
        random=random,
        task_name="mail.welcome",
    )


def wait(outcome: Retried | Failed) -> timedelta:
    assert isinstance(outcome, Retried)
    assert outcome.delay is not None
    return outcome.delay


def delays(policy: Retry, attempts: int = 5) -> list[float]:
    outcomes = [after(policy, attempt=attempt) for attempt in range(1, attempts + 1)]
    return [wait(each).total_seconds() for each in outcomes if isinstance(each, Retried)]


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        (Retry.constant(SECOND * 3), [3, 3, 3, 3, 3]),
        (Retry.constant(timedelta(0)), [0, 0, 0, 0, 0]),
        (Retry.linear(SECOND * 2), [2, 4, 6, 8, 10]),
        (Retry.linear(SECOND * 2, cap=SECOND * 5), [2, 4, 5, 5, 5]),
        (Retry.exponential(), [1, 2, 4, 8, 16]),
        (Retry.exponential(factor=3, cap=SECOND * 10), [1, 3, 9, 10, 10]),
        (Retry.exponential(base=timedelta(0)), [0, 0, 0, 0, 0]),
        (Retry.exponential(factor=1), [1, 1, 1, 1, 1]),
        (Retry.never(), []),
    ],
    ids=repr,
)
def test_each_policy_waits_as_it_says(policy: Retry, seconds: list[float]) -> None:
    assert delays(policy) == seconds


def test_full_jitter_draws_from_zero_to_the_delay() -> None:
    draws = itertools.cycle([0.0, 0.25, 1.0])

    waits = [after(Retry.exponential(), attempt=3, random=lambda: next(draws)) for _ in range(3)]

    assert [wait(each) for each in waits] == [timedelta(0), SECOND, SECOND * 4]


def test_without_jitter_nothing_is_drawn() -> None:
    policy = Retry.exponential(jitter=False)

    assert after(policy, random=lambda: 1 / 0) == Retried(SECOND, REPORT)


@given(st.integers(1, 32766), st.floats(0, 1))
def test_no_attempt_is_too_late_for_a_delay(attempt: int, draw: float) -> None:
    policies = [
        DEFAULT_RETRY,
        Retry.linear(MAX_DELAY),
        Retry.exponential(base=MAX_DELAY, factor=1e308, cap=MAX_DELAY),
        Retry.exponential(factor=10**400),
    ]

    for policy in policies:
        outcome = after(policy, attempt=attempt, random=lambda: draw)
        assert timedelta(0) <= wait(outcome) <= MAX_DELAY


@pytest.mark.parametrize(("attempt", "retried"), [(1, True), (2, True), (3, False), (4, False)])
def test_the_last_attempt_is_not_retried(attempt: int, retried: bool) -> None:
    outcome = after(DEFAULT_RETRY, attempt=attempt, max_attempts=3)

    assert isinstance(outcome, Retried) is retried
    assert outcome.error is REPORT


def test_the_way_the_attempt_ended_is_kept() -> None:
    assert after(DEFAULT_RETRY, end=AttemptEnd.TIMEOUT).end is AttemptEnd.TIMEOUT
    assert after(Retry.never(), end=AttemptEnd.TIMEOUT) == Failed(REPORT, AttemptEnd.TIMEOUT)


def test_only_the_listed_errors_are_retried() -> None:
    policy = Retry.constant(SECOND).only(ConnectionError).only(KeyError, TimeoutError)

    assert isinstance(after(policy, error=ConnectionResetError()), Retried)
    assert isinstance(after(policy, error=KeyError()), Retried)
    assert isinstance(after(policy, error=ValueError()), Failed)


def test_the_excluded_errors_are_never_retried() -> None:
    policy = Retry.constant(SECOND).never_on(LookupError).never_on(ValueError)

    assert isinstance(after(policy, error=KeyError()), Failed)
    assert isinstance(after(policy, error=ValueError()), Failed)
    assert isinstance(after(policy, error=OSError()), Retried)


def test_an_exclusion_wins_over_a_list() -> None:
    policy = Retry.constant(SECOND).only(OSError).never_on(PermissionError)

    assert isinstance(after(policy, error=PermissionError()), Failed)
    assert isinstance(after(policy, error=FileNotFoundError()), Retried)


class TenTimes:
    def __call__(self, attempt: int, error: BaseException) -> float:
        return attempt * 10


def ten_times(attempt: int, error: BaseException, /) -> timedelta:
    return attempt * 10 * SECOND


@pytest.mark.parametrize(
    "function",
    [
        TenTimes(),
        TenTimes().__call__,
        ten_times,
        lambda n, failure: n * 10,
        lambda n, failure, step=10: n * step,
        lambda *given: given[0] * 10,
        lambda attempt, error: attempt * 10 + len(str(error)) - 1,
    ],
)
def test_a_function_is_called_with_the_attempt_and_the_error(function: Any) -> None:
    assert after(Retry(function), attempt=2) == Retried(SECOND * 20, REPORT)


@pytest.mark.parametrize(
    "function",
    [
        lambda: 1,
        lambda attempt: 1,
        lambda attempt, error, more: 1,
        lambda *, attempt, error: 1,
        lambda attempt, error, *, seconds: 1,
        lambda **given: 1,
    ],
)
def test_a_function_of_another_signature_is_refused_at_once(function: Any) -> None:
    with pytest.raises(OptionError, match=r"cannot be called as function\(attempt, error\): "):
        Retry(function)


@pytest.mark.parametrize("given", [3, [10, 30, 60]])
def test_who_gives_a_number_or_pauses_is_told_what_to_write(given: Any) -> None:
    with pytest.raises(OptionError, match=r"Retry\.constant.*; the number of attempts is max_att"):
        Retry(given)


@pytest.mark.parametrize(
    "answer",
    [None, math.nan, math.inf, -1, -0.001, 1e308, 10**400, True, "5", timedelta(-1), timedelta.max],
    ids=lambda answer: f"{answer!s:.12}",
)
def test_an_answer_of_no_use_is_replaced_by_the_default_and_logged(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = after(Retry(lambda attempt, error: answer), attempt=3)

    assert outcome == Retried(SECOND * 4, REPORT)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "mail.welcome" in caplog.text


@pytest.mark.parametrize("error_type", [ZeroDivisionError, SystemExit, RecursionError])
def test_a_function_that_raises_is_replaced_by_the_default_and_logged(
    error_type: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(attempt: int, error: BaseException) -> float:
        raise error_type

    outcome = after(Retry(broken))

    assert outcome == Retried(SECOND, REPORT)
    assert "mail.welcome: its retry function" in caplog.text
    assert f"raised {error_type.__name__}" in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: Retry.constant(5),  # type: ignore[arg-type]  # the mistake under test
        lambda: Retry.constant(-SECOND),
        lambda: Retry.constant(timedelta.max),
        lambda: Retry.linear(SECOND, cap=-SECOND),
        lambda: Retry.linear(SECOND, cap=5),  # type: ignore[arg-type]  # the mistake under test
        lambda: Retry.exponential(base=-SECOND),
        lambda: Retry.exponential(cap=timedelta.max),
        lambda: Retry.exponential(factor=0.5),
        lambda: Retry.exponential(factor=math.nan),
        lambda: Retry.exponential(factor=math.inf),
        lambda: Retry.exponential(factor="2"),  # type: ignore[arg-type]  # the mistake under test
        lambda: Retry.never().only(),
        lambda: Retry.never().only("ValueError"),  # type: ignore[arg-type]  # the mistake
        lambda: Retry.never().never_on(int),  # type: ignore[arg-type]  # the mistake under test
        lambda: Retry.never().never_on(ValueError("x")),  # type: ignore[arg-type]  # the mistake
        lambda: Retry(5),  # type: ignore[arg-type]  # the mistake under test
    ],
)
def test_an_option_out_of_range_is_refused_at_once(make: Callable[[], Retry]) -> None:
    with pytest.raises(OptionError):
        make()


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (DEFAULT_RETRY, "Retry.exponential(base=0:00:01, factor=2, cap=1:00:00, jitter=True)"),
        (Retry.constant(SECOND * 90), "Retry.constant(0:01:30)"),
        (Retry.never(), "Retry.never()"),
        (Retry(ten_times), "Retry(ten_times)"),
        (
            Retry.constant(SECOND).only(OSError, KeyError).never_on(PermissionError),
            "Retry.constant(0:00:01).only(OSError, KeyError).never_on(PermissionError)",
        ),
    ],
)
def test_a_policy_reads_as_it_is_written(policy: Retry, text: str) -> None:
    assert repr(policy) == text


def test_for_at_most_composes_with_the_other_rules_and_leaves_the_time_to_the_settle() -> None:
    policy = Retry.constant(SECOND).for_at_most(SECOND * 30).never_on(KeyError)

    outcome = after(policy)

    assert isinstance(outcome, Retried)
    assert (outcome.delay, outcome.give_up_after) == (SECOND, SECOND * 30)
    assert isinstance(after(policy, error=KeyError()), Failed)
    assert isinstance(after(policy, attempt=3, max_attempts=3), Failed)
    assert repr(policy) == "Retry.constant(0:00:01).never_on(KeyError).for_at_most(0:00:30)"
    assert after(Retry(lambda attempt, error: 5).for_at_most(SECOND)) == Retried(
        SECOND * 5, REPORT, give_up_after=SECOND
    )


@pytest.mark.parametrize("duration", [timedelta(0), -SECOND, MAX_DELAY + SECOND, 5, None])
def test_for_at_most_takes_a_timedelta_above_zero(duration: Any) -> None:
    with pytest.raises(
        OptionError, match=r"for_at_most\(\): duration is .*; give a timedelta above zero"
    ):
        Retry.never().for_at_most(duration)


@pytest.mark.parametrize(
    "policy",
    [
        Retry.never(),
        Retry.constant(SECOND),
        Retry.linear(SECOND),
        Retry.exponential(factor=1.5, jitter=False).in_queue("retries").with_priority(0),
        Retry.exponential().for_at_most(SECOND * 7),
    ],
    ids=repr,
)
def test_a_stored_policy_is_read_as_it_was_with_the_exceptions_of_the_task(policy: Retry) -> None:
    task = Retry.never().only(ValueError).never_on(KeyError)

    stored = json.loads(json.dumps(policy.stored(), sort_keys=True))

    assert Retry.from_stored(stored, task) == policy.only(ValueError).never_on(KeyError)


@pytest.mark.parametrize(
    "stored",
    [
        {},
        [],
        7,
        {"constant": {}},
        {"constant": 7},
        {"constant": {"interval": -1}},
        {"constant": {"interval": 1e999}},
        {"never": {}, "constant": {"interval": 1}},
        {"never": {}, "in_queue": "a b"},
        {"never": {}, "with_priority": 10},
        {"exponential": {"base": 1, "with": 2}},
    ],
    ids=repr,
)
def test_a_policy_written_by_hand_counts_as_none(stored: Any) -> None:
    of_task = Options(task="t")

    meta = json.dumps({"pgqueue.retry": stored})

    assert of_task.as_enqueued(meta).retry == DEFAULT_RETRY


def test_a_repr_has_the_queue_and_the_priority() -> None:
    policy = Retry.never().in_queue("retries").with_priority(9)

    assert repr(policy) == "Retry.never().in_queue('retries').with_priority(9)"
