"""Decides which jobs are admitted to their limits.  Pure: reads nothing, writes nothing.

Only one worker admits at a time, and what it reads is at least as old as the decision: places may
have become free since, and none can have been taken.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from pgqueue.limits import name_of


@dataclass(frozen=True, slots=True)
class Rule:
    """A limit as it is in force."""

    capacity: int
    is_strict: bool = False
    skips_failed: bool = False


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


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that waits to be admitted."""

    limit_keys: tuple[str, ...]
    priority: int
    run_at: datetime
    job_id: int
    is_due: bool = True


Rules = Mapping[str, Rule]


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

    ``held``: how many places are held under each key.  ``locked``: jobs whose rows another
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
        has_room = all(taken[key] < rules[name_of(key)].capacity for key in job.limit_keys)
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
