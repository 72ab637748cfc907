"""Limits and rates hold while workers are killed."""

from __future__ import annotations

import time
from collections import defaultdict
from types import SimpleNamespace

import sqlalchemy
from sqlalchemy import Boolean, cast, false, null

from chaos.environment import Environment
from chaos.history import END, START, Event
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import wait
from chaos.scenario import Size, scenario

KEYS = ("red", "green", "blue", "grey")
OF_A_KEY, OF_ALL = 1, 3
MOST_OF_A_KEY, MOST_OF_ALL = 10 + 2 * 2 - 1, 30 + 2 * 3 - 1
"""Starts in any second: the rate, and twice its burst but one."""

STARTS = """
    SELECT args ->> 'key' AS key, extract(epoch FROM start.started_at) AS at
    FROM pgqueue.jobs
    CROSS JOIN LATERAL (
        SELECT attempts AS attempt, started_at
        UNION
        SELECT attempt, started_at FROM pgqueue.job_attempts WHERE job_id = jobs.id
    ) AS start
    ORDER BY at
"""
"""By the database's clock."""


STARTS_BEFORE = """
    SELECT count(*) FROM pgqueue.jobs AS single, pgqueue.jobs AS other
    WHERE single.id = :single AND other.args ->> 'key' = 'red'
      AND other.started_at BETWEEN single.created_at AND single.started_at
"""
STARTS_IN_A_ROUND = 40
"""Which the workers may make on a busy machine until the admission that follows an enqueue."""


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
def a_lease_holds_no_place(patch: Patch) -> None:
    """The place of a job counts as free once the job has no message, though it has a lease."""
    from pgqueue.repository import admit as admitting

    never = SimpleNamespace(where=lambda *_: false())
    changed = {**vars(sqlalchemy), "exists": lambda *_: never}
    patch.set(admitting, "sa", SimpleNamespace(**changed))
    patch.rebuild(admitting.places_under, admitting.places_after, admitting.send_back)


@mutation
def no_key_gets_a_turn(patch: Patch) -> None:
    """Jobs are admitted in the order of their times, whatever their keys."""
    from pgqueue.rules import admission

    patch.set(admission, "_in_turns", lambda jobs, _: jobs)


@mutation
def a_backlog_is_ready(patch: Patch) -> None:
    """Jobs are admitted although no slot becomes free for them soon."""
    from pgqueue.worker.duties import admit

    patch.set(admit, "KEYS_FOR_ONE_MORE", 0.001)


@mutation
def retries_take_no_token(patch: Patch) -> None:
    """A job under a rate that starts again is not admitted again."""
    from pgqueue.repository import rescue, settle

    patch.set(settle, "_next_start_counts", lambda: cast(null(), Boolean))
    patch.rebuild(settle.settle, rescue.rescue_leases)


@mutation
def busy_workers_save_starts_up(patch: Patch) -> None:
    """Jobs that were admitted and have not started are forgotten at the next admission."""
    from pgqueue.rules.admission import held_by_key
    from pgqueue.worker.duties import admit

    patch.set(admit, "held_by_key", lambda _, *rest: held_by_key([], *rest))


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
    """kill -9: never more jobs run than their limits say, and all of them end."""
    from chaos.limited_tasks import call_in_turn  # here: no other scenario has limits

    rows = [(key, 25) for _ in range(size.jobs // len(KEYS)) for key in KEYS]
    environment.enqueue(call_in_turn.options(max_attempts=1000), rows)
    options = {"concurrency": 4, "poll_interval": 0.1, "imports": ["chaos.limited_tasks"]}
    workers = environment.workers(size.workers, **options)
    for number in range(size.faults):
        environment.until_ended_are((number + 1) * len(rows) // (size.faults + 2))
        workers.kill_one()
    environment.finish(workers)
    events = environment.history()
    for limit, by_key in ((OF_A_KEY, True), (OF_ALL, False)):
        most = most_at_once(events, by_key=by_key)
        environment.expect(most <= limit, f"{most} jobs ran at once under a limit of {limit}")
    environment.check(succeeded=len(rows))


@scenario(
    promises="P8",
    research="L1",
    full=Size(jobs=1_000, workers=8, faults=40, seconds=10),
    short=Size(jobs=80, workers=4, faults=3, seconds=2),
    mutated={
        "retries_take_no_token": "within a second",
        "busy_workers_save_starts_up": "within a second",
    },
    alone=True,
)
def rates_under_kills(environment: Environment, size: Size) -> None:
    """kill -9: no second has more starts than its rate, and all of them end.

    All slots are busy at first, while admissions go on.
    """
    from chaos.limited_tasks import call_at_a_rate

    slots = 4
    options = {"concurrency": slots, "poll_interval": 0.1, "imports": ["chaos.limited_tasks"]}
    workers = environment.workers(size.workers, **options)
    busy = environment.enqueue(wait, [("busy",)] * (size.workers * slots))
    environment.until_started(*busy)
    rows = [(key,) for _ in range(size.jobs // len(KEYS)) for key in KEYS]
    environment.enqueue(call_at_a_rate, rows)
    environment.let_pass(size.seconds)  # tokens could be saved up
    environment.open("busy")
    for number in range(size.faults):
        environment.until_ended_are(len(busy) + (number + 1) * len(rows) // (size.faults + 2))
        workers.kill_one()
    environment.finish(workers)
    starts = [(row.key, float(row.at)) for row in environment.rows(STARTS)]
    for key in KEYS:
        most = most_in_a_second([at for of, at in starts if of == key])
        environment.expect(most <= MOST_OF_A_KEY, f"{most} jobs of a key started within a second")
    most = most_in_a_second([at for key, at in starts if key])
    environment.expect(most <= MOST_OF_ALL, f"{most} jobs started within a second")
    environment.check(succeeded=len(rows) + len(busy))


@scenario(
    promises="P15",
    research="L1",
    full=Size(jobs=5_000, workers=8, faults=40),
    short=Size(jobs=600, workers=4, faults=3),
    mutated={
        "no_key_gets_a_turn": "waited for",
        "a_backlog_is_ready": "waited for",
    },
    alone=True,
)
def turns_under_kills(environment: Environment, size: Size) -> None:
    """kill -9: single jobs start soon, whatever backlog another key has."""
    from chaos.limited_tasks import call_by_turns

    slots = 4
    backlog = environment.enqueue(call_by_turns, [("red", 25)] * size.jobs)
    options = {"concurrency": slots, "poll_interval": 0.1, "imports": ["chaos.limited_tasks"]}
    workers = environment.workers(size.workers, **options)
    singles = []
    for number in range(size.faults):
        environment.until_ended_are((number + 1) * size.jobs // (2 * size.faults))
        workers.kill_one()
        singles += environment.enqueue(call_by_turns, [(f"green{number}",)])
    environment.finish(workers)
    # Twice: a job may be admitted for a worker that is killed before it claims.
    bound = 2 * (size.workers * slots + slots) + STARTS_IN_A_ROUND
    for single in singles:
        before = environment.scalar(STARTS_BEFORE, single=single)
        environment.expect(before <= bound, f"a single job waited for {before} of a backlog")
    environment.check(succeeded=len(backlog) + len(singles))


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
