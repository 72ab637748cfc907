"""Decides which jobs are admitted to their limits.  Pure: reads nothing, writes nothing.

Only one worker admits at a time, and what it reads is at least as old as the decision: places may
have become free since, and none can have been taken.

A rate is a token bucket for each key.  It holds ``burst`` tokens, an admission takes one, and one
comes back every ``period / capacity``.  All of its state is the time at which it is full again.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pgqueue.limits import name_of


@dataclass(frozen=True, slots=True)
class Rule:
    """A limit as it is in force."""

    capacity: int
    """How many jobs run at once, or with a period start in it."""
    is_strict: bool = False
    skips_failed: bool = False
    period: timedelta | None = None
    burst: int = 1

    @property
    def most_at_once(self) -> int:
        """How many places a key has: of a rate, the tokens of a full bucket."""
        return self.burst if self.period is not None and self.capacity else self.capacity

    @property
    def spacing(self) -> timedelta:
        """The time in which a token comes back: rounded up, so that never too many do."""
        if self.period is None or not self.capacity:
            return timedelta()
        return -(-self.period // self.capacity)


@dataclass(frozen=True, slots=True)
class Place:
    """A place that a job has taken under one key."""

    key: str
    job_id: int
    is_held: bool
    """Whether the job has a message or a lease; otherwise the place is free."""
    may_go_back: bool = False
    """Whether the job does not run and cannot start now: it waits for its retry, or is paused."""
    limit_keys: tuple[str, ...] = ()
    has_started: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that waits to be admitted."""

    limit_keys: tuple[str, ...]
    priority: int
    run_at: datetime
    job_id: int
    is_due: bool = True


@dataclass(frozen=True, slots=True)
class Buckets:
    """The token buckets of some keys as they were at one moment of the database's clock."""

    now: datetime
    full_at: Mapping[str, datetime]
    """When each bucket is full again; a bucket that is not here is full."""


Rules = Mapping[str, Rule]


def is_rate(key: str, rules: Rules) -> bool:
    rule = rules.get(name_of(key))
    return rule is not None and rule.period is not None


def held_by_key(places: Iterable[Place], buckets: Buckets, rules: Rules) -> Counter[str]:
    """How many places are held under each key; under a rate, how many tokens are missing.

    Jobs that were admitted and have not started are missing tokens too, however long ago they were
    admitted: busy workers do not save starts up.
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
    """When the buckets of these keys are full again after so many starts."""
    return {
        key: _full_at(key, buckets, rules) + count * rules[name_of(key)].spacing
        for key, count in starts.items()
    }


def next_token(keys: Iterable[str], buckets: Buckets, rules: Rules) -> timedelta | None:
    """How long until one of these keys that have no token has one; None if no key waits for it."""
    waits = []
    for key in keys:
        rule = rules[name_of(key)]
        wait = _full_at(key, buckets, rules) - buckets.now - (rule.burst - 1) * rule.spacing
        if wait > timedelta():
            waits.append(wait)
    return min(waits, default=None)


def _missing_tokens(key: str, buckets: Buckets, rules: Rules) -> int:
    spacing = rules[name_of(key)].spacing
    missing = _full_at(key, buckets, rules) - buckets.now
    return -(-missing // spacing) if spacing else 0


def _full_at(key: str, buckets: Buckets, rules: Rules) -> datetime:
    """At the latest when an empty bucket would be: the rule or the clock may have changed since."""
    rule, now = rules[name_of(key)], buckets.now
    return min(max(buckets.full_at.get(key, now), now), now + rule.burst * rule.spacing)


def to_send_back(places: Iterable[Place], rules: Rules) -> list[int]:
    """The admitted jobs that give up their places until they can start again.

    The head of a strict limit keeps its place, and so blocks the others, unless its rule is skip.
    """
    return sorted(
        {
            place.job_id
            for place in places
            if place.is_held and place.may_go_back and not _blocks(place.limit_keys, rules)
        }
    )


def to_admit(
    waiting: Sequence[Waiting],
    held: Mapping[str, int],
    rules: Rules,
    *,
    locked: Collection[int] = (),
    most: int,
) -> list[int]:
    """The waiting jobs that are admitted, in the order in which they start.

    ``held``: of :func:`held_by_key`.  ``locked``: jobs whose rows another
    transaction has locked.  A job is admitted if there is room under all its keys.  Under a strict
    key, a job that is due and is not admitted keeps all later ones back.
    """
    taken = Counter(held)
    closed: set[str] = set()
    admitted: list[int] = []
    for job in sorted(waiting, key=_in_order):
        if len(admitted) == most:
            break
        if not job.is_due or not all(name_of(key) in rules for key in job.limit_keys):
            continue
        has_room = all(taken[key] < rules[name_of(key)].most_at_once for key in job.limit_keys)
        if has_room and job.job_id not in locked and closed.isdisjoint(job.limit_keys):
            admitted.append(job.job_id)
            taken.update(job.limit_keys)
        else:
            closed.update(key for key in job.limit_keys if rules[name_of(key)].is_strict)
    return admitted


def _blocks(limit_keys: Iterable[str], rules: Rules) -> bool:
    of_job = (rules.get(name_of(key)) for key in limit_keys)
    return any(rule is None or (rule.is_strict and not rule.skips_failed) for rule in of_job)


def _in_order(job: Waiting) -> tuple[int, datetime, int]:
    return job.priority, job.run_at, job.job_id
