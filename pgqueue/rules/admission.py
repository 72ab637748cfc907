"""Decides which jobs are admitted to their limits, without reading or writing the database.

Only one worker admits at a time.  Between its reads and its decision, places may become free, but
no other worker can take one.

A rate has a token bucket for each key.  A bucket holds ``burst`` tokens.  An admission takes a
token, and one token comes back every ``period / capacity``.  The only state of a bucket is the time
at which it is full again.

The keys of a fair limit take turns.  Only as many of its jobs are admitted as will soon find a free
slot, so that a job of another key waits for these jobs only.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from pgqueue.rules.limits import name_of

NEVER = datetime.min.replace(tzinfo=UTC)
TURNS_ARE_KEPT = timedelta(hours=1)
"""How long the last turn of a key is remembered.  A key without a remembered turn comes first."""


@dataclass(frozen=True, slots=True)
class LimitRule:
    """A limit in force."""

    capacity: int
    """How many jobs run at once, or start in each ``period``."""
    is_strict: bool = False
    skips_failed: bool = False
    period: timedelta | None = None
    burst: int = 1
    is_fair: bool = False

    @property
    def most_at_once(self) -> int:
        """How many places a key has; for a rate, the tokens of a full bucket."""
        return self.burst if self.period is not None and self.capacity else self.capacity

    @property
    def spacing(self) -> timedelta:
        """The time in which one token comes back; rounded up, so that none comes too soon."""
        if self.period is None or not self.capacity:
            return timedelta()
        return -(-self.period // self.capacity)


class Place(NamedTuple):
    """A place that a job has taken under one key."""

    key: str
    job_id: int
    is_held: bool
    """Whether the job has a message or a lease; otherwise the place is free."""
    may_go_back: bool = False
    """Whether the job does not run, and waits for its retry or is paused."""
    limit_keys: tuple[str, ...] = ()
    has_started: bool = False
    queue: str = ""
    priority: int = 0
    id: int = 0


class WaitingJob(NamedTuple):
    """A job that waits to be admitted."""

    limit_keys: tuple[str, ...]
    priority: int
    run_at: datetime
    job_id: int
    is_due: bool = True
    queue: str = ""


@dataclass(frozen=True, slots=True)
class Buckets:
    """The token buckets of some keys at one time of the database's clock."""

    now: datetime
    full_at: Mapping[str, datetime]
    """When each bucket is full again.  A missing key has a full bucket."""


class TurnGroup(NamedTuple):
    """Jobs among which the keys of a fair limit take turns: of one queue and one priority."""

    name: str
    queue: str
    priority: int


@dataclass(frozen=True, slots=True)
class Turns:
    """The last turns of the keys of fair limits, and the admitted jobs that have not started."""

    ready: Mapping[TurnGroup, int] = field(default_factory=dict)
    """How many jobs are admitted and have not started."""
    most_ready: int = 0
    """The bound of each number in ``ready``."""
    last: Mapping[str, datetime] = field(default_factory=dict)
    """When the keys had their last turns.  A missing key has had no recent turn."""


NO_TURNS = Turns()

Rules = Mapping[str, LimitRule]
"""Rules by the name of their limit, and the rules of keys with their own capacity by the key."""


def rule_of(key: str, rules: Rules) -> LimitRule | None:
    """Return the rule in force for a key; None if no worker has declared its limit."""
    return rules.get(key) or rules.get(name_of(key))


def with_keys(keys: Iterable[str], rules: Rules) -> Rules:
    """The rules, and that of each of these keys by the key: it is then found at once."""
    found = ((key, rule_of(key, rules)) for key in keys)
    return {**rules, **{key: rule for key, rule in found if rule is not None}}


def is_rate(key: str, rules: Rules) -> bool:
    rule = rule_of(key, rules)
    return rule is not None and rule.period is not None


def is_fair(key: str, rules: Rules) -> bool:
    rule = rule_of(key, rules)
    return rule is not None and rule.is_fair


def ready_by_group(places: Iterable[Place], rules: Rules) -> Counter[TurnGroup]:
    """How many jobs of fair limits are admitted and have not started.

    A job has a place under its key, and one under the name of the limit.
    """
    ready = {
        (place.job_id, TurnGroup(name_of(place.key), place.queue, place.priority))
        for place in places
        if place.is_held and not place.has_started and is_fair(place.key, rules)
    }
    return Counter(group for _, group in ready)


def turn_group(job: WaitingJob, rules: Rules) -> TurnGroup | None:
    """The group in which the job's key takes turns; None without a fair limit."""
    names = (name_of(key) for key in job.limit_keys if is_fair(key, rules))
    return next((TurnGroup(name, job.queue, job.priority) for name in names), None)


def last_turn(job: WaitingJob, last: Mapping[str, datetime], rules: Rules) -> datetime:
    """When the job's key had its last turn; NEVER without a remembered turn."""
    turns = (last.get(key, NEVER) for key in job.limit_keys if is_fair(key, rules))
    return next(turns, NEVER)


def fair_names(jobs: Iterable[WaitingJob], rules: Rules) -> list[tuple[str, int]]:
    """The second places of jobs of fair limits, each under the name of its limit.

    Under the name, an admission finds all admitted jobs of the limit, whatever their keys.
    """
    return [
        (name_of(key), job.job_id) for job in jobs for key in job.limit_keys if is_fair(key, rules)
    ]


def held_by_key(places: Iterable[Place], buckets: Buckets, rules: Rules) -> Counter[str]:
    """How many places are held under each key; under a rate, how many tokens are missing.

    A job that was admitted and has not started holds its token, however long ago it was admitted,
    so that no starts accumulate while workers are busy.
    """
    held = Counter(
        place.key
        for place in places
        if place.is_held and not (place.has_started and is_rate(place.key, rules))
    )
    for key in buckets.full_at:
        held[key] = max(held[key], _missing_tokens(key, buckets, rules))
    return held


def after_starts(starts: Mapping[str, int], buckets: Buckets, rules: Rules) -> dict[str, datetime]:
    """When the buckets that change are full again, after this number of starts under each key.

    A bucket without a start changes if its stored time is later than that of an empty bucket.
    Otherwise it would look empty until the stored time, which may be centuries ahead.
    """
    full_at = {}
    for key, count in starts.items():
        rule, full = _declared_rule(key, rules), _full_at(key, buckets, rules)
        if count or (rule.capacity and full < buckets.full_at.get(key, full)):
            full_at[key] = full + count * rule.spacing
    return full_at


def after_turns(jobs: Iterable[WaitingJob], now: datetime, rules: Rules) -> dict[str, datetime]:
    """Return until when the turns of these jobs' keys are remembered.

    The keys of later jobs are remembered longer.
    """
    keys = [key for job in jobs for key in job.limit_keys if is_fair(key, rules)]
    end = now + TURNS_ARE_KEPT
    return {key: end + timedelta(microseconds=number) for number, key in enumerate(keys)}


def next_token(keys: Iterable[str], buckets: Buckets, rules: Rules) -> timedelta | None:
    """How long until a key that has no token gets one; None if all of these keys have one."""
    waits = []
    for key in keys:
        rule = _declared_rule(key, rules)
        wait = _full_at(key, buckets, rules) - buckets.now - (rule.burst - 1) * rule.spacing
        if wait > timedelta():
            waits.append(wait)
    return min(waits, default=None)


def _missing_tokens(key: str, buckets: Buckets, rules: Rules) -> int:
    spacing = _declared_rule(key, rules).spacing
    missing = _full_at(key, buckets, rules) - buckets.now
    return -(-missing // spacing) if spacing else 0


def _full_at(key: str, buckets: Buckets, rules: Rules) -> datetime:
    """When the bucket is full; at most the time at which an empty bucket would be full.

    The stored time may be later, if the rule or the clock has changed since.
    """
    rule, now = _declared_rule(key, rules), buckets.now
    return min(max(buckets.full_at.get(key, now), now), now + rule.burst * rule.spacing)


def to_send_back(places: Iterable[Place], rules: Rules) -> list[int]:
    """Return the admitted jobs that give up their places until they can start again.

    The first job of a strict limit keeps its place, and so blocks the others, unless the limit
    skips failed jobs.  A job under a limit that no worker has declared keeps its place too.
    """
    sent_back = set()
    for place in places:
        if place.is_held and place.may_go_back:
            declared = [rule_of(key, rules) for key in place.limit_keys]
            if all(rule and (rule.skips_failed or not rule.is_strict) for rule in declared):
                sent_back.add(place.job_id)
    return sorted(sent_back)


def to_admit(
    waiting: Sequence[WaitingJob],
    held: Mapping[str, int],
    rules: Rules,
    *,
    locked: Collection[int] = (),
    most: int,
    turns: Turns = NO_TURNS,
) -> list[int]:
    """Return the waiting jobs that are admitted, in the order in which they start.

    ``held`` is the result of :func:`held_by_key`.  ``locked`` are jobs whose rows another
    transaction has locked.  A job is admitted if all its keys have a free place.  Under a strict
    key, a job that is due and is not admitted holds back all later jobs.
    """
    taken, ready = Counter(held), Counter(turns.ready)
    closed: set[str] = set()
    admitted: list[int] = []
    terms_of = {keys: _terms_of(keys, rules) for keys in {job.limit_keys for job in waiting}}
    due = [(job, terms) for job in waiting if job.is_due and (terms := terms_of[job.limit_keys])]
    due.sort(key=lambda each: (each[0].priority, each[0].run_at, each[0].job_id))
    for job, terms in _in_turns(due, turns.last):
        if len(admitted) == most:
            break
        has_room = all(taken[key] < most_at_once for key, most_at_once in terms.most.items())
        group = _group_of(job, terms)
        is_next = group is None or ready[group] < turns.most_ready
        if has_room and is_next and job.job_id not in locked and closed.isdisjoint(job.limit_keys):
            admitted.append(job.job_id)
            taken.update(job.limit_keys)
            ready.update([group] if group else [])
        else:
            closed.update(terms.strict)
    return admitted


class _Terms(NamedTuple):
    """The terms of all limits of a job."""

    most: Mapping[str, int]
    """How many places each key has."""
    strict: Collection[str]
    fair: str | None
    """The key that takes turns with others."""


_Due = tuple[WaitingJob, _Terms]


def _terms_of(limit_keys: Iterable[str], rules: Rules) -> _Terms | None:
    """Return the terms of some keys; None if one of their limits is not declared."""
    most: dict[str, int] = {}
    strict: list[str] = []
    fair = None
    for key in limit_keys:
        rule = rule_of(key, rules)
        if rule is None:
            return None
        most[key] = rule.most_at_once
        if rule.is_strict:
            strict.append(key)
        if rule.is_fair and fair is None:
            fair = key
    return _Terms(most, strict, fair)


def _in_turns(jobs: list[_Due], last: Mapping[str, datetime]) -> list[_Due]:
    """Reorder the jobs of each group so that its keys take turns; other jobs stay in place.

    First comes one job of each key, beginning with the key whose last turn is longest ago; then a
    second job of each key, and so on.
    """
    groups: defaultdict[TurnGroup, list[_Turn]] = defaultdict(list)
    positions: defaultdict[tuple[TurnGroup, str], list[int]] = defaultdict(list)
    for position, (job, terms) in enumerate(jobs):
        if terms.fair is not None and (group := _group_of(job, terms)) is not None:
            of_key = positions[group, terms.fair]
            of_key.append(position)
            last_turn = last.get(terms.fair, NEVER)
            groups[group].append(_Turn(len(of_key), last_turn, of_key[0], position))
    reordered = list(jobs)
    for turns in groups.values():
        for turn, chosen in zip(turns, sorted(turns), strict=True):
            reordered[turn.position] = jobs[chosen.position]
    return reordered


class _Turn(NamedTuple):
    """The sort key of a job in its group; the lowest starts first."""

    number: int
    last: datetime
    first_of_key: int
    position: int


def _group_of(job: WaitingJob, terms: _Terms) -> TurnGroup | None:
    return None if terms.fair is None else TurnGroup(name_of(terms.fair), job.queue, job.priority)


def _declared_rule(key: str, rules: Rules) -> LimitRule:
    return rules.get(key) or rules[name_of(key)]
