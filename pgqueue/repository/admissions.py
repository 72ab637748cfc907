"""What an admission reads and writes, and what operators see of limits."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection, Executable
from sqlalchemy.orm import Session

from pgqueue.admission import Buckets, Place, Rule, Waiting
from pgqueue.connections.fast_path import fetch
from pgqueue.limits import SEPARATOR, Limit, name_of
from pgqueue.repository.workers import NOTHING_PAUSED, Paused
from pgqueue.statements import admitting
from pgqueue.statements.tables import array_of


class LaneKey(NamedTuple):
    """The jobs that are admitted in the order of their times."""

    limit_keys: str
    queue: str
    priority: int


def lane_of(job: Waiting) -> LaneKey:
    return LaneKey(SEPARATOR.join(job.limit_keys), job.queue, job.priority)


FIRST_LANE = LaneKey("", "", -1)
"""Before all lanes."""
FIRST_PLACE = ("", 0)
"""Before all places."""


class Lanes(NamedTuple):
    """Some lanes, and the first jobs in them."""

    number: int
    """How many lanes were read."""
    last: LaneKey | None
    """The last lane that was read; None if there was none."""
    are_all: bool
    """Whether there are no lanes after them."""
    waiting: list[Waiting]
    seconds_to_next: float | None
    """How long until the next of these jobs is due; None if all are due."""


class LimitState(NamedTuple):
    """A limit, and the jobs under it; a row of ``queue.limits``."""

    name: str
    declared: int
    """The capacity in the code."""
    capacity: int
    """The capacity in force."""
    is_set: bool
    """Whether the capacity was set by ``queue.set_limit``."""
    held: int
    """How many jobs have a place: they run, or start next."""
    waiting: int
    period: timedelta | None = None
    """Of a rate: the time in which ``capacity`` jobs start; None if the limit counts jobs at once.
    """
    burst: int | None = None
    is_fair: bool = False
    """Whether it stands for ``fair_by`` of a task: its keys take turns."""


class Admissions:
    """The jobs that wait for room in their limits, behind one Session or Connection."""

    def __init__(self, executor: Session | Connection) -> None:
        self._executor = executor

    def serialize(self) -> None:
        """Wait until no other transaction admits; none does until this one ends."""
        self._executor.execute(admitting.serialize_admissions())

    def rules(self) -> dict[str, Rule]:
        """The limits in force: by name, and by key for keys with a capacity of their own."""
        rules = {name: Rule(*rest) for name, *rest in self._fetch(admitting.rules(), {})}
        name_of_key = {key: name_of(key) for key in rules if name_of(key) != key}
        for key, name in name_of_key.items():
            rule, capacity = rules.get(name, rules[key]), rules[key].capacity
            rules[key] = replace(rule, capacity=min(capacity, 1) if rule.is_strict else capacity)
        return rules

    def first_waiting(
        self, after: LaneKey, *, queues: Sequence[str], tasks: str, lanes: int, of_lane: int
    ) -> Lanes:
        """The first jobs of the lanes that follow ``after``."""
        parameters = {
            "after_keys": after.limit_keys,
            "after_queue": after.queue,
            "after_priority": after.priority,
            "queues": array_of(queues),
            "tasks": tasks,
            "most_lanes": lanes,
            "most_of_lane": of_lane,
        }
        lanes_read: dict[LaneKey, None] = {}
        waiting, later = [], []
        for *lane, run_at, job_id, seconds in self._fetch(admitting.first_waiting(), parameters):
            key = LaneKey(*lane)
            lanes_read[key] = None
            if job_id is None:
                continue
            keys = tuple(key.limit_keys.split(SEPARATOR))
            waiting.append(
                Waiting(keys, key.priority, run_at, job_id, is_due=seconds <= 0, queue=key.queue)
            )
            if seconds > 0:
                later.append(float(seconds))
        number, last = len(lanes_read), next(reversed(lanes_read), None)
        return Lanes(number, last, number < lanes, waiting, min(later, default=None))

    def places_under(self, keys: Iterable[str], *, paused: Paused) -> list[Place]:
        """All places under these keys."""
        documents = json.dumps([{"key": key} for key in keys])
        return self._places(admitting.places_under(), {"keys": documents, **_pause_of(paused)})

    def buckets(self, keys: Iterable[str]) -> Buckets:
        """The token buckets of these keys; there must be at least one key."""
        documents = json.dumps([{"key": key} for key in keys])
        rows = self._fetch(admitting.buckets(), {"keys": documents})
        return Buckets(rows[0][2], {key: full_at for key, full_at, _ in rows if full_at})

    def write_buckets(self, full_at: Mapping[str, datetime]) -> None:
        """Write when token buckets are full again."""
        buckets = [{"limit_key": key, "full_at": at.isoformat()} for key, at in full_at.items()]
        self._executor.execute(admitting.write_buckets(), {"given": json.dumps(buckets)})

    def delete_full_buckets(self, *, most: int) -> None:
        self._executor.execute(admitting.delete_full_buckets(), {"most": most})

    def places_after(self, place: tuple[str, int], *, most: int) -> list[Place]:
        """The next places after this one, in the order of their keys."""
        after = {"after_key": place[0], "after_id": place[1]}
        return self._places(
            admitting.places_after(), {**after, "most": most, **_pause_of(NOTHING_PAUSED)}
        )

    def add_places(self, places: Iterable[tuple[str, int]]) -> None:
        """Give jobs that were just admitted more places, by their keys and ids."""
        more = [{"limit_key": key, "job_id": job_id} for key, job_id in places]
        self._executor.execute(admitting.add_places(), {"more": json.dumps(more)})

    def delete_places(self, places: Iterable[Place]) -> None:
        """Delete places that are free."""
        free = [{"limit_key": place.key, "job_id": place.job_id} for place in places]
        self._executor.execute(admitting.delete_places(), {"free": json.dumps(free)})

    def send_back(self, job_ids: Sequence[int], *, paused: Paused) -> set[int]:
        """Make admitted jobs that cannot start now wait again; returns the jobs sent back.

        Locks the jobs first: the next statement then sees every lease that others have written.
        """
        ids = {"job_ids": _array(job_ids)}
        locked = [row[0] for row in self._fetch(admitting.lock_admitted(), ids)]
        parameters = {"job_ids": _array(locked), **_pause_of(paused)}
        return {row[0] for row in self._fetch(admitting.send_back(), parameters)}

    def admit(self, job_ids: Sequence[int], *, notify: bool) -> set[int]:
        """Move jobs to the message queue; returns those that no other transaction had locked."""
        rows = self._fetch(admitting.admit(notify=notify), {"job_ids": _array(job_ids)})
        return {row[0] for row in rows}

    def free(self, jobs: Sequence[Waiting]) -> set[int]:
        """Which of these jobs no other transaction has locked."""
        ids = {"job_ids": _array([job.job_id for job in jobs])}
        return {row[0] for row in self._fetch(admitting.free_to_admit(), ids)}

    def drop_useless(self, waiting: Iterable[Waiting]) -> None:
        """Delete those of these waiting messages whose jobs have ended or are gone."""
        messages = [
            {"limit_keys": SEPARATOR.join(job.limit_keys), "job_id": job.job_id} for job in waiting
        ]
        self._executor.execute(admitting.drop_useless(), {"given": json.dumps(messages)})

    def declare(self, limits: Iterable[Limit]) -> None:
        """Write the limits of the code."""
        self._executor.execute(admitting.declare(), _declared(limits))

    def declare_new(self, limits: Iterable[Limit]) -> None:
        """Write those of these limits that no worker has declared."""
        self._executor.execute(admitting.declare_new(), _declared(limits))

    def are_declared(self) -> bool:
        """Whether any worker has ever declared a limit in this database."""
        return bool(self._executor.execute(admitting.are_declared()).scalar())

    def set_capacity(self, name: str, capacity: int | None) -> bool:
        """Set a capacity, or with None that of the code; False if no limit has this name."""
        parameters = {"limit_name": name, "new_capacity": capacity}
        return self._executor.execute(admitting.set_capacity(), parameters).first() is not None

    def set_capacity_of_key(self, name: str, key: str, capacity: int | None) -> None:
        """Set the capacity of one key of a limit, or with None that of the limit."""
        parameters = {"limit_name": name, "key": key, "new_capacity": capacity}
        self._executor.execute(admitting.set_capacity_of_key(), parameters)

    def all(self) -> list[LimitState]:
        """All limits that were declared.  Reads all places and waiting messages."""
        rows = self._executor.execute(admitting.all_limits()).all()
        held, waiting = self._held({row.name for row in rows if row.is_fair}), self._waiting()
        return [
            LimitState(name, declared, capacity, is_set, held[name], waiting[name], *kind)
            for name, declared, capacity, is_set, *kind in rows
        ]

    def undeclared(self) -> dict[str, int]:
        """How many jobs wait for each limit that no worker has declared: no worker admits them."""
        declared = self.rules()
        waiting = sorted(self._waiting().items())
        return {
            name: count for name, count in waiting if name not in declared and name_of(name) == name
        }

    def _held(self, fair: Collection[str]) -> Counter[str]:
        """How many jobs hold places, by name and by key."""
        held: Counter[str] = Counter()
        parameters = _pause_of(NOTHING_PAUSED)
        for key, count in self._executor.execute(admitting.held_by_key(), parameters):
            if key not in fair:  # skips second places, under the names of fair limits
                held.update(dict.fromkeys({key, name_of(key)}, count))
        return held

    def _waiting(self) -> Counter[str]:
        """How many jobs wait for each limit, by name and by key."""
        waiting: Counter[str] = Counter()
        for keys, count in self._executor.execute(admitting.waiting_by_keys()):
            for key in keys.split(SEPARATOR):
                waiting.update(dict.fromkeys({key, name_of(key)}, count))
        return waiting

    def _places(self, statement: Executable, parameters: dict[str, Any]) -> list[Place]:
        return [
            Place(key, job_id, is_held, may_go_back, tuple((keys or "").split(SEPARATOR)), *rest)
            for key, job_id, is_held, may_go_back, keys, *rest in self._fetch(statement, parameters)
        ]

    def _fetch(self, statement: Executable, parameters: dict[str, Any]) -> Sequence[Any]:
        return fetch(self._executor, statement, parameters)


def _declared(limits: Iterable[Limit]) -> dict[str, str]:
    rows = [
        {
            "name": limit.name,
            "declared": limit.capacity,
            "is_strict": limit.is_strict,
            "skips_failed": limit.failed_head == "skip",
            "period": limit.per.total_seconds() if limit.per else None,
            "burst": limit.burst if limit.per else None,
            "is_fair": limit.is_fair,
        }
        for limit in limits
    ]
    return {"given": json.dumps(rows)}


def _pause_of(paused: Paused) -> dict[str, str]:
    return {"paused": array_of(paused.queues), "paused_tasks": array_of(paused.tasks)}


def _array(job_ids: Sequence[int]) -> str:
    return array_of(map(str, job_ids))
