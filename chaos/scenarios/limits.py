"""Limits and rates, which hold while workers are killed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import Boolean, cast, null

from chaos.environment import Environment
from chaos.history import END, START, Event
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import AT_ONCE, FIRST, note, queue
from pgqueue import JobContext, Limit

KEYS = ("red", "green", "blue", "grey")
OF_A_KEY, OF_ALL = 1, 3
SECOND = timedelta(seconds=1)
MOST_OF_A_KEY, MOST_OF_ALL = 5 + 2 * 2 - 1, 10 + 2 * 3 - 1
"""Starts in any second: the rate, and twice its burst but one."""
STARTS = """
    SELECT args ->> 'key' AS key, extract(epoch FROM start.started_at) AS at
    FROM pgqueue.jobs
    CROSS JOIN LATERAL (
        SELECT attempts AS attempt, started_at
        UNION
        SELECT attempt, started_at FROM pgqueue.job_attempts WHERE job_id = jobs.id
    ) AS start
    WHERE task = :task ORDER BY at
"""
"""By the database's clock."""


@queue.task(retry=AT_ONCE, priority=FIRST, limit=(Limit(OF_A_KEY, by="key"), Limit(OF_ALL)))
def call_in_turn(ctx: JobContext, key: str, milliseconds: float = 0) -> None:
    """Something of which one may run for each key, and three in all."""
    note(START, ctx, key=key)
    time.sleep(milliseconds / 1000)
    note(END, ctx, key=key)


@queue.task(
    retry=AT_ONCE,
    priority=FIRST,
    limit=(
        Limit(5, by="key", per=SECOND, burst=2, name="starts_of_key"),
        Limit(10, per=SECOND, burst=3, name="starts"),
    ),
)
def call_at_a_rate(ctx: JobContext, key: str) -> None:
    """Something that fails the first time, and of which so many may start in a second."""
    note(START, ctx, key=key)
    note(END, ctx, key=key)
    if ctx.attempt == 1:
        raise ValueError("planned")


@mutation
def admissions_beside_each_other(patch: Patch) -> None:
    """Several workers admit at once.

    They are slow to commit, as over a slow network, and leave free places alone: to delete one,
    two of them would wait for each other.
    """
    from pgqueue.repository.admit import Admissions

    patch.set(Admissions, "serialize", lambda _: None)
    patch.set(Admissions, "delete_places", lambda *_: None)
    admit = Admissions.admit

    def slowly(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        admitted = admit(self, *args, **kwargs)
        time.sleep(0.02 if admitted else 0)
        return admitted

    patch.set(Admissions, "admit", slowly)


@mutation
def retries_take_no_token(patch: Patch) -> None:
    """A job under a rate that starts again is not admitted again."""
    from pgqueue.repository import rescue, settle

    patch.set(settle, "_next_start_counts", lambda: cast(null(), Boolean))
    patch.rebuild(settle.settle, rescue.rescue_leases)


@mutation
def declares_no_limits(patch: Patch) -> None:
    """A worker declares its tasks without their limits, for those who enqueue by name."""
    from pgqueue.tasks import Task

    def without_limits(self: Any) -> dict[str, Any]:
        return {**declaration(self), "limits": []}

    declaration: Callable[..., Any] = patch.set(Task, "declaration", without_limits)


@queue.task(
    retry=AT_ONCE,
    priority=FIRST,
    max_attempts=1000,
    limit=Limit(1, by="key", order="strict", name="in_order"),
)
def call_in_order(ctx: JobContext, key: str, number: int) -> None:
    """Something that waits for the one before it, and that fails the first time now and then."""
    note(START, ctx, number=number, key=key)
    note(END, ctx, key=key)
    if ctx.attempt == 1 and number % 5 == 3:
        raise ValueError("planned")


class LimitedJobs:
    """Jobs of which so many may run at once, one after the other, or start in a second."""

    def __init__(self, environment: Environment, faults: int) -> None:
        self._environment = environment
        self._faults = faults
        self.clients: list[Callable[[], None]] = [self._enqueue_by_name]
        limited = call_in_turn.options(max_attempts=1000)
        rated = call_at_a_rate.options(max_attempts=1000)
        self._limited = set(
            environment.enqueue(limited, [(key, 25) for _ in range(5 * faults) for key in KEYS])
        )
        rows = [(key, number) for number in range(2 * faults) for key in KEYS]
        self._ordered = environment.enqueue(call_in_order, rows)
        self._rated = environment.enqueue(rated, [(key,) for _ in range(faults) for key in KEYS])

    def succeeded(self) -> int:
        return len(self._limited) + len(self._ordered) + len(self._rated)

    def _enqueue_by_name(self) -> None:
        """As one who has not the code of the task: SQL makes the keys."""
        environment = self._environment
        environment.until(lambda: bool(environment.history(START)), what="a job has started")
        for _ in range(2 * self._faults):
            with environment.queue.session() as session, session.begin():
                new = [
                    environment.queue.enqueue_by_name(
                        session,
                        call_in_turn.name,
                        {"key": key, "milliseconds": 25},
                        max_attempts=1000,
                    )
                    for key in KEYS
                ]
            environment.acknowledged.update(new)
            self._limited.update(new)

    def judge(self) -> None:
        expect = self._environment.expect
        history = self._environment.history()
        events = [each for each in history if each.job in self._limited]
        for limit, by_key in ((OF_A_KEY, True), (OF_ALL, False)):
            most = most_at_once(events, by_key=by_key)
            expect(most <= limit, f"{most} jobs ran at once under a limit of {limit}")
        for key in KEYS:
            of_key = [each for each in history if "number" in each.details]
            numbers = [each.details["number"] for each in of_key if each.details["key"] == key]
            expect(numbers == sorted(numbers), f"the jobs of {key} have started in another order")
        rows = self._environment.rows(STARTS, task=call_at_a_rate.name)
        starts = [(row.key, float(row.at)) for row in rows]
        for key in KEYS:
            most = most_in_a_second([at for of, at in starts if of == key])
            expect(most <= MOST_OF_A_KEY, f"{most} jobs of a key started within a second")
        most = most_in_a_second([at for _, at in starts])
        expect(most <= MOST_OF_ALL, f"{most} jobs started within a second")


def most_in_a_second(times: list[float]) -> int:
    """The most of these times that lie within one second, without its end."""
    most = first = 0
    for last, at in enumerate(times):
        while times[first] <= at - 1:
            first += 1
        most = max(most, last - first + 1)
    return most


def most_at_once(events: list[Event], *, by_key: bool) -> int:
    """The most jobs that ran at the same moment; a killed job runs until it has ended again."""
    running: dict[str, set[int]] = defaultdict(set)
    most = 0
    for event in events:
        if event.word not in (START, END):
            continue
        under = running[event.details["key"] if by_key else ""]
        if event.word == START:
            under.add(event.job)
        else:
            under.discard(event.job)
        most = max(most, len(under))
    return most
