"""Which jobs are admitted: decided without a database."""

from collections import Counter
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from pgqueue.admission import Place, Rule, Waiting, to_admit, to_send_back
from pgqueue.limits import name_of

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
ANY = Rule(2)
STRICT = Rule(1, is_strict=True)
SKIPPING = Rule(1, is_strict=True, skips_failed=True)

RULES = st.fixed_dictionaries(
    {
        "queue:mail": st.builds(Rule, st.integers(0, 4)),
        "task": st.builds(Rule, st.integers(0, 4)),
        "strict": st.builds(Rule, st.integers(0, 1), st.just(True), st.booleans()),
    }
)
KEYS = st.sets(
    st.sampled_from(["queue:mail", "task 1", "task 2", "strict 1", "strict 2", "unknown"]),
    min_size=1,
    max_size=3,
).map(lambda keys: tuple(sorted(keys)))
JOBS = st.lists(
    st.tuples(KEYS, st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=25
).map(
    lambda rows: [
        Waiting(keys, priority, EPOCH + timedelta(seconds=second), number, is_due=is_due)
        for number, (keys, priority, second, is_due) in enumerate(rows)
    ]
)
HELD = st.dictionaries(st.sampled_from(["queue:mail", "task 1", "strict 1"]), st.integers(0, 5))


def job(
    *keys: str, id: int = 1, second: int = 0, priority: int = 5, is_due: bool = True
) -> Waiting:
    return Waiting(keys, priority, EPOCH + timedelta(seconds=second), id, is_due=is_due)


@settings(max_examples=500, deadline=None)
@given(waiting=JOBS, held=HELD, rules=RULES, locked=st.sets(st.integers(0, 24)))
def test_no_key_gets_more_places_than_its_capacity(
    waiting: list[Waiting], held: dict[str, int], rules: dict[str, Rule], locked: set[int]
) -> None:
    admitted = set(to_admit(waiting, held, rules, locked=locked, most=100))

    taken = Counter(held)
    for one in waiting:
        if one.job_id in admitted:
            taken.update(one.limit_keys)
            assert one.is_due
            assert one.job_id not in locked
    for one in waiting:
        for key in one.limit_keys:
            if one.job_id in admitted:
                assert taken[key] <= rules[name_of(key)].capacity


@settings(max_examples=500, deadline=None)
@given(waiting=JOBS, held=HELD, rules=RULES, locked=st.sets(st.integers(0, 24)))
def test_under_a_strict_key_no_job_overtakes_another(
    waiting: list[Waiting], held: dict[str, int], rules: dict[str, Rule], locked: set[int]
) -> None:
    admitted = set(to_admit(waiting, held, rules, locked=locked, most=100))

    order = sorted(waiting, key=lambda one: (one.priority, one.run_at, one.job_id))
    for key in ("strict 1", "strict 2"):
        known = [
            one
            for one in order
            if key in one.limit_keys and one.is_due and "unknown" not in one.limit_keys
        ]
        taken = [one.job_id in admitted for one in known]
        assert taken == sorted(taken, reverse=True)


@settings(max_examples=500, deadline=None)
@given(waiting=JOBS, held=HELD, rules=RULES)
def test_a_job_stays_only_for_a_reason(
    waiting: list[Waiting], held: dict[str, int], rules: dict[str, Rule]
) -> None:
    """It is not due, a limit is unknown or full, or a strict key has an earlier job that stays."""
    admitted = set(to_admit(waiting, held, rules, most=100))

    taken = Counter(held)
    for one in waiting:
        if one.job_id in admitted:
            taken.update(one.limit_keys)
    for one in waiting:
        if one.job_id in admitted or not one.is_due or "unknown" in one.limit_keys:
            continue
        is_full = any(taken[key] >= rules[name_of(key)].capacity for key in one.limit_keys)
        is_kept_back = any(rules[name_of(key)].is_strict for key in one.limit_keys)
        assert is_full or is_kept_back


def test_jobs_are_admitted_in_the_order_of_priority_time_and_id() -> None:
    waiting = [
        job("task", id=1, second=2),
        job("task", id=3, second=1),
        job("task", id=2, second=1),
        job("task", id=4, second=9, priority=0),
    ]

    assert to_admit(waiting, {}, {"task": Rule(3)}, most=10) == [4, 2, 3]


def test_a_full_key_keeps_no_other_key_back() -> None:
    waiting = [job("task 1", id=number) for number in range(10)] + [job("task 2", id=99)]

    assert to_admit(waiting, {"task 1": 2}, {"task": ANY}, most=10) == [99]


def test_a_locked_job_lets_others_pass_but_not_under_a_strict_key() -> None:
    waiting = [job("task", id=1), job("task", id=2, second=1)]

    assert to_admit(waiting, {}, {"task": ANY}, locked={1}, most=10) == [2]
    assert to_admit(waiting, {}, {"task": STRICT}, locked={1}, most=10) == []


def test_no_more_are_admitted_at_once_than_asked_for() -> None:
    waiting = [job("task", id=number) for number in range(10)]

    assert len(to_admit(waiting, {}, {"task": Rule(9)}, most=4)) == 4


def test_a_job_that_cannot_start_now_gives_its_place_back_unless_it_blocks() -> None:
    places = [
        Place("task", 1, is_held=True, may_go_back=True, limit_keys=("task",)),
        Place("task", 2, is_held=True, may_go_back=False, limit_keys=("task",)),
        Place("task", 3, is_held=False, may_go_back=False, limit_keys=("task",)),
        Place("strict", 4, is_held=True, may_go_back=True, limit_keys=("strict",)),
        Place("skip", 5, is_held=True, may_go_back=True, limit_keys=("skip", "task")),
        Place("task", 6, is_held=True, may_go_back=True, limit_keys=("strict", "task")),
        Place("task", 7, is_held=True, may_go_back=True, limit_keys=("task", "unknown")),
    ]
    rules = {"task": ANY, "strict": STRICT, "skip": SKIPPING}

    assert to_send_back(places, rules) == [1, 5]
