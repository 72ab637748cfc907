"""Limits hold while workers are killed, in both modes at once."""

from __future__ import annotations

import time
from collections import defaultdict
from types import SimpleNamespace

from sqlalchemy import false

from chaos.environment import Environment
from chaos.history import END, START, Event
from chaos.mutations import Patch, mutation
from chaos.scenario import Size, scenario

KEYS = ("red", "green", "blue", "grey")
OF_A_KEY, OF_ALL = 1, 3


@mutation
def admissions_beside_each_other(patch: Patch) -> None:
    """Several workers admit at once.

    They are slow to commit, as over a slow network, and leave free places alone: to delete one,
    two of them would wait for each other.
    """
    from pgqueue.repository import Admissions

    patch.set(Admissions, "serialize", lambda _: None)
    patch.set(Admissions, "delete_places", lambda *_: None)
    admit = Admissions.admit

    def slowly(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        admitted = admit(self, *args, **kwargs)
        time.sleep(0.02 if admitted else 0)
        return admitted

    patch.set(Admissions, "admit", slowly)


@mutation
def a_lease_holds_no_place(patch: Patch) -> None:
    """The place of a job counts as free once the job has no message, though it has a lease."""
    from pgqueue.statements import admitting

    never = SimpleNamespace(where=lambda *_: false())
    patch.set(admitting, "exists", lambda *_: never)
    patch.rebuild(admitting.places_under, admitting.places_after, admitting.send_back)


@scenario(
    promises="P8",
    research="L1",
    full=Size(jobs=4_000, workers=8, faults=60),
    short=Size(jobs=160, workers=4, faults=4),
    mutated={
        "admissions_beside_each_other": "ran at once",
        "a_lease_holds_no_place": "ran at once",
    },
    alone=True,
)
def limits_under_kills(environment: Environment, size: Size) -> None:
    """kill -9 in both modes: never more jobs run than their limits say, and all of them end."""
    from chaos.limited_tasks import call_in_turn  # here: no other scenario has limits

    rows = [(key, 25) for _ in range(size.jobs // len(KEYS)) for key in KEYS]
    environment.enqueue(call_in_turn.options(max_attempts=1000), rows)
    half = size.workers // 2
    options = {"concurrency": 4, "poll_interval": 0.1, "imports": ["chaos.limited_tasks"]}
    fleets = [environment.workers(mode, half, **options) for mode in ("lease", "transaction")]
    for number in range(size.faults):
        environment.until_ended_are((number + 1) * len(rows) // (size.faults + 2))
        workers = fleets[number % 2]
        workers.kill(workers.some())
        workers.add()
    environment.until_ended()
    for workers in fleets:
        workers.stop()
    events = environment.history()
    for limit, by_key in ((OF_A_KEY, True), (OF_ALL, False)):
        most = most_at_once(events, by_key=by_key)
        environment.expect(most <= limit, f"{most} jobs ran at once under a limit of {limit}")
    environment.check(succeeded=len(rows))


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
