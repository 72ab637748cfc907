"""The claim under every plan that a misled planner may choose."""

from __future__ import annotations

from itertools import product
from typing import Any

from sqlalchemy import delete, select

from chaos.environment import Environment
from chaos.interleavings.logical_workers import TASK, LogicalWorker, worker_settings
from chaos.mutations import Patch, mutation
from chaos.plans import AUTO_EXPLAIN, Plan, plans_of, prepare_at_once
from chaos.scenario import Size, scenario
from pgqueue.repository import claim
from pgqueue.repository.tables import message_queue

LIMIT = 7
MOST_BUFFERS = 60 * LIMIT + 200
"""Pages for one claim, however many messages there are."""

JOINS = {
    "its own joins": {},
    "nested loops": {"enable_hashjoin": "off", "enable_mergejoin": "off"},
    "bare nested loops": {
        **dict.fromkeys(("enable_hashjoin", "enable_mergejoin"), "off"),
        **dict.fromkeys(("enable_hashagg", "enable_material", "enable_memoize"), "off"),
    },
    "hash joins": {"enable_nestloop": "off", "enable_mergejoin": "off"},
    "merge joins": {"enable_nestloop": "off", "enable_hashjoin": "off", "enable_sort": "on"},
}
CACHES = ("force_generic_plan", "force_custom_plan", "auto")

BARE = (("bare nested loops", JOINS["bare nested loops"]), "force_generic_plan")
"""The plan that a careless claim does not survive: always tried."""

BACKLOG = """
    WITH job AS (
        INSERT INTO pgqueue.jobs (task) SELECT :task FROM generate_series(1, :count)
        RETURNING id, queue, priority, run_at, task)
    INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task)
    SELECT queue, priority, run_at, id, task FROM job
"""
UNKNOWN = 20_000
"""Messages of which the planner knows nothing; the large backlog is filled once."""

QUIET = "ALTER TABLE pgqueue.{} SET (autovacuum_enabled = off)"
TABLES = ("message_queue", "jobs", "leases")


@mutation
def claims_by_subquery(patch: Patch) -> None:
    """Deletes `WHERE id IN (SELECT ... LIMIT n FOR UPDATE SKIP LOCKED)`, not an array of places:
    a nested loop may run the sub-query again for each outer row and then takes more.  Most of
    its plans show by reading far more than a claim has to."""

    def taken(_due: Any, **_: bool) -> Any:
        queue = message_queue
        due = claim._due_messages(suspects=True, registered=True).subquery("due")
        by_id = queue.c.id.in_(select(due.c.id))
        return delete(queue).where(by_id).returning(queue).cte("message")

    patch.set(claim, "_taken_messages", taken)
    patch.rebuild(claim.claim)


@scenario(
    promises="P1 P6",
    full=Size(jobs=1_000_000, faults=15),
    short=Size(jobs=20_000, faults=2),
    mutated={"claims_by_subquery": "claim of 7 took|pages were read, .* at most"},
    alone=True,
)
def claim_plans(environment: Environment, size: Size) -> None:
    """Misled planners: a claim takes no more than it was asked for, and reads no more either."""
    environment.sampler.pause()  # a check reads all of jobs
    for table in TABLES:
        environment.execute(QUIET.format(table))
    for knowledge in ("nothing", "few", "all"):
        if knowledge == "few":  # and no dead rows, which any plan has to pass by
            environment.execute(
                "TRUNCATE pgqueue.message_queue, pgqueue.jobs, pgqueue.leases CASCADE"
            )
            _fill(environment, 5)
            environment.execute("ANALYZE")
        if knowledge != "all":
            _fill(environment, size.jobs if knowledge == "few" else min(size.jobs, UNKNOWN))
        else:
            environment.execute("ANALYZE")
        slow = _claim_with_plans(environment, size, knowledge, at_most=MOST_BUFFERS)
        environment.expect(not slow, "; ".join(slow[:5]))
    _empty(environment)
    _fill(environment, 50 * LIMIT)
    _claim_with_plans(environment, size, "a backlog that is gone", at_most=None)
    environment.expect(environment.counts["plans"] > 0, "no plan was tried")


def _fill(environment: Environment, count: int) -> None:
    environment.execute(BACKLOG, task=TASK, count=count)
    environment.count("messages", count)


def _empty(environment: Environment) -> None:
    """The rows go, and what ANALYZE has seen stays."""
    for table in TABLES:
        environment.execute(f"DELETE FROM pgqueue.{table}")


def _claim_with_plans(
    environment: Environment, size: Size, knowledge: str, *, at_most: int | None
) -> list[str]:
    """Complaints about plans that read too much, or other than by the key.

    ``faults`` is how many of the settings are tried: all, or some by the seed.
    """
    slow: list[str] = []
    every = list(product(JOINS.items(), CACHES))
    some = environment.dice.sample(every, min(size.faults, len(every)))
    for (joins, settings), cache in [*some, BARE]:
        more = {"plan_cache_mode": cache, **settings, **AUTO_EXPLAIN}
        words = f"{joins}, {cache}, the planner knows {knowledge}"
        engine = prepare_at_once(worker_settings(environment.url, **more))
        worker = LogicalWorker(engine)
        try:
            for plan in _claim_twice(environment, worker, words):
                environment.count("plans")
                if at_most is not None:
                    slow += _complaints(plan, words, at_most=at_most)
        finally:
            worker.close()
            engine.dispose()
    return slow


def _claim_twice(environment: Environment, worker: LogicalWorker, words: str) -> list[Plan]:
    """A plan that is kept is used from the second time on."""
    with plans_of(worker.line) as plans:
        for _ in range(2):
            found = worker.look(LIMIT).taken
            environment.expect(found == LIMIT, f"a claim of {LIMIT} took {found} messages: {words}")
    return plans.seen


def _complaints(plan: Plan, words: str, *, at_most: int) -> list[str]:
    scans = plan.scans_of("message_queue")
    by_key = {"Index Scan message_queue_pkey", "Index Only Scan message_queue_pkey", "Tid Scan"}
    wrong = []
    if not scans <= by_key:
        wrong.append(f"messages were read by {scans}: {words}")
    if plan.buffers > at_most:
        wrong.append(f"{plan.buffers} pages were read, {at_most} at most: {words}")
    return wrong
