"""Which jobs are admitted: decided without a database."""

from collections import Counter
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from pgqueue.rules.admission import (
    Buckets,
    LimitRule,
    Place,
    TurnGroup,
    Turns,
    WaitingJob,
    after_starts,
    after_turns,
    held_by_key,
    next_token,
    ready_by_group,
    to_admit,
    to_send_back,
)
from pgqueue.rules.limits import name_of

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
ANY = LimitRule(2)
STRICT = LimitRule(1, is_strict=True)
SKIPPING = LimitRule(1, is_strict=True, skips_failed=True)

RULES = st.fixed_dictionaries(
    {
        "queue:mail": st.builds(LimitRule, st.integers(0, 4)),
        "task": st.builds(LimitRule, st.integers(0, 4)),
        "strict": st.builds(LimitRule, st.integers(0, 1), st.just(True), st.booleans()),
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
        WaitingJob(keys, priority, EPOCH + timedelta(seconds=second), number, is_due=is_due)
        for number, (keys, priority, second, is_due) in enumerate(rows)
    ]
)
HELD = st.dictionaries(st.sampled_from(["queue:mail", "task 1", "strict 1"]), st.integers(0, 5))


def job(
    *keys: str, id: int = 1, second: int = 0, priority: int = 5, is_due: bool = True
) -> WaitingJob:
    return WaitingJob(keys, priority, EPOCH + timedelta(seconds=second), id, is_due=is_due)


@given(waiting=JOBS, held=HELD, rules=RULES, locked=st.sets(st.integers(0, 24)))
def test_no_key_gets_more_places_than_its_capacity(
    waiting: list[WaitingJob], held: dict[str, int], rules: dict[str, LimitRule], locked: set[int]
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


@given(waiting=JOBS, held=HELD, rules=RULES, locked=st.sets(st.integers(0, 24)))
def test_under_a_strict_key_no_job_overtakes_another(
    waiting: list[WaitingJob], held: dict[str, int], rules: dict[str, LimitRule], locked: set[int]
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


@given(waiting=JOBS, held=HELD, rules=RULES)
def test_a_job_stays_only_for_a_reason(
    waiting: list[WaitingJob], held: dict[str, int], rules: dict[str, LimitRule]
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

    assert to_admit(waiting, {}, {"task": LimitRule(3)}, most=10) == [4, 2, 3]


def test_a_locked_job_lets_others_pass_but_not_under_a_strict_key() -> None:
    waiting = [job("task", id=1), job("task", id=2, second=1)]

    assert to_admit(waiting, {}, {"task": ANY}, locked={1}, most=10) == [2]
    assert to_admit(waiting, {}, {"task": STRICT}, locked={1}, most=10) == []


def test_no_more_are_admitted_at_once_than_asked_for() -> None:
    waiting = [job("task", id=number) for number in range(10)]

    assert len(to_admit(waiting, {}, {"task": LimitRule(9)}, most=4)) == 4


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


MILLISECOND = timedelta(milliseconds=1)
RATES = st.builds(
    LimitRule,
    st.integers(1, 12),
    period=st.integers(1, 5000).map(lambda number: number * MILLISECOND),
    burst=st.integers(1, 6),
)


class RatedKey:
    """One key of a rate, with the starts that it has admitted and the jobs that have started."""

    def __init__(self, rule: LimitRule) -> None:
        self.rules = {"api": rule}
        self.full_at: dict[str, datetime] = {}
        self.unstarted = 0
        self.admitted: list[datetime] = []
        self.started: list[datetime] = []

    def admit(self, now: datetime, waiting: int) -> timedelta | None:
        """Admit as one round does; returns how long until the next token, if a job waits for it."""
        buckets = Buckets(now, self.full_at)
        places = [Place("api", number, is_held=True) for number in range(self.unstarted)]
        places += [Place("api", -1, is_held=True, has_started=True)] * len(self.started)
        jobs = [job("api", id=number) for number in range(waiting)]
        count = len(to_admit(jobs, held_by_key(places, buckets, self.rules), self.rules, most=100))
        self.full_at |= after_starts({"api": count}, buckets, self.rules)
        self.admitted += [now] * count
        self.unstarted += count
        if count == waiting:
            return None
        return next_token(["api"], Buckets(now, self.full_at), self.rules)

    def start(self, now: datetime, most: int) -> None:
        count = min(most, self.unstarted)
        self.started += [now] * count
        self.unstarted -= count


def most_in(times: list[datetime], period: timedelta) -> int:
    """The most of these times that lie in any stretch of this length, without its end."""
    return max((sum(at <= one < at + period for one in times) for at in times), default=0)


@given(
    rule=RATES,
    rounds=st.lists(
        st.tuples(st.integers(0, 3000), st.integers(0, 20), st.integers(0, 8)), max_size=60
    ),
)
def test_no_period_has_more_starts_than_the_rate_and_its_burst_allow(
    rule: LimitRule, rounds: list[tuple[int, int, int]]
) -> None:
    """Workers that are busy start what was admitted late, and all at once."""
    assert rule.period is not None
    key, now = RatedKey(rule), EPOCH
    for wait, waiting, starting in rounds:
        now += wait * MILLISECOND
        key.admit(now, waiting)
        key.start(now, starting)

    assert most_in(key.admitted, rule.period) <= rule.capacity + rule.burst - 1
    assert most_in(key.started, rule.period) <= rule.capacity + 2 * rule.burst - 1


@given(rule=RATES)
def test_a_round_at_the_time_of_the_next_token_admits_and_one_before_does_not(
    rule: LimitRule,
) -> None:
    key, now = RatedKey(rule), EPOCH
    for _ in range(10):
        wait = key.admit(now, waiting=100)
        key.start(now, most=100)
        assert wait is not None
        before = len(key.admitted)
        key.admit(now + wait - timedelta(microseconds=1), waiting=100)
        assert len(key.admitted) == before
        now += wait
        key.admit(now, waiting=100)
        assert len(key.admitted) == before + 1
        key.start(now, most=100)


def test_a_bucket_that_was_emptied_under_a_slower_rate_or_a_later_clock_is_soon_used_again() -> (
    None
):
    key = RatedKey(LimitRule(1, period=timedelta(hours=1), burst=2))
    key.admit(EPOCH, waiting=2)
    key.start(EPOCH, 2)
    assert key.admit(EPOCH, waiting=1) == timedelta(hours=1)

    key.rules = {"api": LimitRule(60, period=timedelta(hours=1), burst=2)}
    assert key.admit(EPOCH, waiting=1) == timedelta(minutes=1)
    assert key.admit(EPOCH - timedelta(days=1), waiting=1) == timedelta(minutes=1)


def test_a_rate_of_zero_admits_nothing_and_waits_for_no_token() -> None:
    key = RatedKey(LimitRule(0, period=timedelta(hours=1), burst=5))

    assert key.admit(EPOCH, waiting=3) is None
    assert key.admitted == []


FAIR = {"fair": LimitRule(1_000_000, is_fair=True), "task": LimitRule(2)}
TENANTS = st.lists(st.sampled_from("abcd"), max_size=40)


def tenants_of(waiting: list[WaitingJob], admitted: list[int]) -> list[str]:
    by_id = {one.job_id: one.limit_keys[0].removeprefix("fair ") for one in waiting}
    return [by_id[job_id] for job_id in admitted]


def of_tenants(tenants: list[str] | str) -> list[WaitingJob]:
    return [job(f"fair {one}", id=number, second=number) for number, one in enumerate(tenants)]


@given(tenants=TENANTS)
def test_keys_take_turns_until_their_jobs_are_used_up(tenants: list[str]) -> None:
    waiting = of_tenants(tenants)

    admitted = to_admit(waiting, {}, FAIR, most=100, turns=Turns(most_ready=100))

    assert sorted(admitted) == [one.job_id for one in waiting]
    order = tenants_of(waiting, admitted)
    left = Counter(tenants)
    while order:
        turn, order = order[: len(left)], order[len(left) :]
        assert sorted(turn) == sorted(left)  # one job of each that has any
        left -= Counter(turn)
    for tenant in set(tenants):
        every = zip(admitted, tenants_of(waiting, admitted), strict=True)
        own = [one for one, of in every if of == tenant]
        assert own == sorted(own)


@given(tenants=TENANTS, most_ready=st.integers(1, 4))
def test_turns_go_on_from_one_admission_to_the_next(tenants: list[str], most_ready: int) -> None:
    waiting = of_tenants(tenants)
    at_once = to_admit(waiting, {}, FAIR, most=100, turns=Turns(most_ready=100))
    last: dict[str, datetime] = {}
    order: list[int] = []
    for second in range(len(tenants)):
        left = [one for one in waiting if one.job_id not in order]
        turns = Turns(most_ready=most_ready, last=last)
        admitted = to_admit(left, {}, FAIR, most=100, turns=turns)
        by_id = {one.job_id: one for one in left}
        now = EPOCH + timedelta(seconds=second)
        last |= after_turns([by_id[job_id] for job_id in admitted], now, FAIR)
        order += admitted

    assert tenants_of(waiting, order) == tenants_of(waiting, at_once)


def test_no_more_are_ready_than_soon_find_a_slot() -> None:
    ready = {TurnGroup("fair", "", 5): 2}
    waiting = of_tenants("aab")

    assert to_admit(waiting, {}, FAIR, most=9, turns=Turns(ready, most_ready=3)) == [0]
    assert to_admit(waiting, {}, FAIR, most=9, turns=Turns(ready, most_ready=2)) == []


def test_only_jobs_that_have_not_started_are_ready() -> None:
    places = [
        Place("fair a", 1, is_held=True, queue="mail", priority=5),
        Place("fair", 1, is_held=True, queue="mail", priority=5),
        Place("fair b", 2, is_held=True, queue="mail", priority=5),
        Place("fair a", 3, is_held=True, queue="mail", priority=1),
        Place("fair a", 4, is_held=True, queue="mail", priority=5, has_started=True),
        Place("fair a", 5, is_held=False, queue="mail", priority=5),
        Place("task 1", 6, is_held=True, queue="mail", priority=5),
    ]

    assert ready_by_group(places, FAIR) == {
        TurnGroup("fair", "mail", 5): 2,
        TurnGroup("fair", "mail", 1): 1,
    }


def test_turns_are_taken_within_a_priority_and_others_keep_their_places() -> None:
    waiting = [
        job("fair a", id=1, second=1),
        job("task 1", id=2, second=2),
        job("fair a", id=3, second=3),
        job("fair b", id=4, second=4),
        job("fair b", id=5, second=0, priority=9),
    ]

    assert to_admit(waiting, {}, FAIR, most=9, turns=Turns(most_ready=9)) == [1, 2, 4, 3, 5]


def test_a_key_with_a_capacity_of_its_own_lets_the_others_take_their_turns() -> None:
    waiting = of_tenants("aabab")
    rules = {**FAIR, "fair a": LimitRule(0, is_fair=True)}

    assert to_admit(waiting, {}, rules, most=9, turns=Turns(most_ready=9)) == [2, 4]
