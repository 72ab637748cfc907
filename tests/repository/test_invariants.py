"""Check: every kind of damage, planted by SQL, is reported with the job it befell."""

from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, text

from chaos.interleavings.logical_workers import (
    ERROR,
    LogicalWorker,
    committed,
    declare_dead,
    enqueue,
    enqueue_many,
    execute,
    rescue,
    violations,
)
from chaos.plans import Plan
from pgqueue import PgQueue, Violation
from pgqueue.cli.doctor import remedy_for
from pgqueue.outcomes import Failed, Outcome, Succeeded
from pgqueue.repository import invariants
from pgqueue.worker.looks import Looker


@dataclass(frozen=True)
class Damage:
    """What a job is first, the SQL that breaks it, and the rule that must then be reported."""

    rule: str
    sql: str
    state: str = "pending"
    is_in_view: bool = True
    """Whether the view has the rule; rules about batches are of the check alone."""


MOVED = "a message stands where its job says"
BESIDE = "a message beside a lease is the one the lease holds"
OWNERLESS = "a lease has an owner that lives, or is rescued within a minute"
LONG_AGO = "UPDATE pgqueue.leases SET started_at = started_at - interval '2 minutes'; "
INSERT_MESSAGE = (
    "INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task) "
    "SELECT queue, priority, run_at, id, task FROM pgqueue.jobs WHERE id = :id"
)
NO_MESSAGE = "DELETE FROM pgqueue.message_queue WHERE target_id = :id"
WAITING = f"""{NO_MESSAGE};
    UPDATE pgqueue.jobs SET limit_keys = 'bank' WHERE id = :id;
    INSERT INTO pgqueue.waiting_messages (limit_keys, queue, priority, run_at, target_id, task)
    SELECT limit_keys, queue, priority, run_at, id, task FROM pgqueue.jobs WHERE id = :id"""
PLACE = "INSERT INTO pgqueue.limit_places (limit_key, job_id) VALUES ('bank', :id)"
STANDS = "a waiting message stands where its job says"
BATCH = """INSERT INTO pgqueue.batches (outcome, total, ended_at) VALUES (%s);
    INSERT INTO pgqueue.batch_jobs (batch_id, job_id) SELECT max(id), :id FROM pgqueue.batches"""
DAMAGES = [
    Damage(
        "a job of a batch has its batch",
        "INSERT INTO pgqueue.batch_jobs (batch_id, job_id) VALUES (77, :id)",
        is_in_view=False,
    ),
    Damage(
        "no job is added to a batch after its end",
        BATCH % "'succeeded', 0, now()",
        is_in_view=False,
    ),
    Damage("a batch is blocked until it ends", BATCH % "NULL, NULL, NULL", is_in_view=False),
    Damage(
        "a blocked job has neither message nor lease",
        "INSERT INTO pgqueue.blocked VALUES (:id, :id)",
        is_in_view=False,
    ),
    Damage(
        "a blocked node watches something unfinished, or is looked at within a minute",
        f"""{NO_MESSAGE};
        UPDATE pgqueue.jobs SET created_at = created_at - interval '2 minutes' WHERE id = :id;
        INSERT INTO pgqueue.blocked VALUES (:id, -77)""",
        is_in_view=False,
    ),
    Damage(
        "a waiting message has an unfinished job",
        f"{WAITING}; DELETE FROM pgqueue.jobs WHERE id = :id",
    ),
    Damage(STANDS, f"{WAITING}; UPDATE pgqueue.jobs SET limit_keys = NULL WHERE id = :id"),
    Damage(STANDS, f"{WAITING}; UPDATE pgqueue.jobs SET priority = 1 WHERE id = :id"),
    Damage("a waiting job has neither message nor lease", f"{WAITING}; {INSERT_MESSAGE}; {PLACE}"),
    Damage(
        "an admitted job has a place in each of its limits",
        "UPDATE pgqueue.jobs SET limit_keys = 'bank' WHERE id = :id",
    ),
    Damage(
        "an unfinished job has a message or a lease",
        "DELETE FROM pgqueue.message_queue WHERE target_id = :id",
    ),
    Damage(
        "attempts never exceed max_attempts",
        "UPDATE pgqueue.jobs SET attempts = 11 WHERE id = :id",
    ),
    Damage("a message has a job", "DELETE FROM pgqueue.jobs WHERE id = :id"),
    Damage("a job has at most one message", INSERT_MESSAGE),
    Damage(MOVED, "UPDATE pgqueue.jobs SET queue = 'elsewhere' WHERE id = :id"),
    Damage(MOVED, "UPDATE pgqueue.jobs SET priority = 1 WHERE id = :id"),
    Damage(MOVED, "UPDATE pgqueue.jobs SET run_at = run_at + interval '1 s' WHERE id = :id"),
    Damage(MOVED, "UPDATE pgqueue.jobs SET task = 'tests.other' WHERE id = :id"),
    Damage(MOVED, "UPDATE pgqueue.message_queue SET run_at = '2001-01-01' WHERE target_id = :id"),
    Damage(BESIDE, INSERT_MESSAGE, state="leased"),
    Damage("a lease has a job", "DELETE FROM pgqueue.jobs WHERE id = :id", state="leased"),
    Damage(
        OWNERLESS,
        f"{LONG_AGO} UPDATE pgqueue.leases SET worker_id = gen_random_uuid()",
        state="leased",
    ),
    Damage(
        OWNERLESS,
        f"{LONG_AGO} UPDATE pgqueue.workers SET dead_at = now() - interval '2 minutes'",
        state="leased",
    ),
    Damage(
        "a failed or cancelled job has a dead letter",
        "DELETE FROM pgqueue.dead_letters WHERE job_id = :id",
        state="failed",
    ),
    Damage(
        "a failed or cancelled job has a dead letter",
        "UPDATE pgqueue.dead_letters SET outcome = 'cancelled' WHERE job_id = :id",
        state="failed",
    ),
    Damage(
        "a dead letter says what its job says",
        "UPDATE pgqueue.dead_letters SET outcome = 'cancelled' WHERE job_id = :id",
        state="failed",
    ),
    Damage(
        "a dead letter says what its job says",
        "INSERT INTO pgqueue.dead_letters (job_id, outcome, queue, task) "
        "VALUES (:id, 'failed', 'default', 'tests.task')",
        state="succeeded",
    ),
    Damage(
        "a dead letter says what its job says",
        "DELETE FROM pgqueue.jobs WHERE id = :id",
        state="failed",
    ),
    Damage(
        "an ended job holds no unique key",
        "UPDATE pgqueue.jobs SET held_unique_key = 'k' WHERE id = :id",
        state="succeeded",
    ),
    Damage(
        "a succeeded job was attempted",
        "UPDATE pgqueue.jobs SET attempts = 0 WHERE id = :id",
        state="succeeded",
    ),
]
ENDINGS: dict[str, Outcome] = {"failed": Failed(ERROR), "succeeded": Succeeded()}


def bring_to(state: str, worker: LogicalWorker) -> None:
    match state:
        case "leased":
            worker.claim()
        case "failed" | "succeeded":
            worker.run_next(ENDINGS[state])


def by_view(engine: Engine) -> list[tuple[Any, ...]]:
    """What the view says, which cannot change with the code, and must say what the check says."""
    with engine.connect() as connection:
        found = connection.execute(text("SELECT * FROM pgqueue.invariant_violations"))
        return sorted(map(tuple, found))


def mend(engine: Engine, found: list[Violation]) -> None:
    """Do what the doctor says."""
    for violation in found:
        for step in remedy_for(violation):
            match step.split():
                case ["pgqueue", "worker"]:
                    rescue(engine)
                    with engine.connect() as connection:
                        Looker(notify=False).sweep(connection)
                case ["pgqueue", verb, job_id]:
                    with engine.begin() as connection:
                        getattr(PgQueue(), verb)(connection, int(job_id))
                case _:
                    execute(engine, step)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: f"{damage.rule}-{damage.state}")
def test_damage_is_reported_with_its_job(
    engine: Engine, worker: LogicalWorker, damage: Damage
) -> None:
    job_id = enqueue(engine)
    bring_to(damage.state, worker)
    assert violations(engine) == []

    with engine.begin() as connection:
        for statement in damage.sql.split(";"):
            connection.execute(text(statement), {"id": job_id} if ":id" in statement else {})

    found = violations(engine)
    assert (damage.rule, job_id) in {(one.rule, one.job_id) for one in found}
    assert {one.job_id for one in found} == {job_id}
    assert all(f"job {job_id}: {one.rule}; {one.detail}" == str(one) for one in found)
    if damage.is_in_view:
        assert by_view(engine) == sorted((one.rule, one.job_id, one.detail) for one in found)
    mend(engine, found)
    assert violations(engine) == []


def test_every_rule_has_its_damage(engine: Engine) -> None:
    from pgqueue.repository.invariants import invariant_violations

    compiled = invariant_violations().compile(engine)  # type: ignore[attr-defined]  # a select
    texts = [value for value in compiled.params.values() if isinstance(value, str)]

    for damage in DAMAGES:
        assert damage.rule in texts
    assert len({damage.rule for damage in DAMAGES}) == 21


@pytest.mark.parametrize("state", ["pending", "leased", "failed", "succeeded"])
def test_what_is_sound_is_not_reported(engine: Engine, worker: LogicalWorker, state: str) -> None:
    with engine.begin() as connection:
        for _ in range(3):
            enqueue(connection)
    bring_to(state, worker)
    declare_dead(engine, worker)

    assert violations(engine) == []
    assert by_view(engine) == []


def test_what_is_left_of_ended_jobs_is_no_damage(engine: Engine, worker: LogicalWorker) -> None:
    job_id = enqueue(engine)
    worker.claim_in_transaction()
    committed(engine, PgQueue().cancel, job_id)
    worker.transaction.rollback()

    assert violations(engine) == []
    assert by_view(engine) == []


def test_a_check_takes_one_pass_over_each_table_however_large_it_is(engine: Engine) -> None:
    with engine.begin() as connection:
        enqueue_many(connection, 20_000)
        connection.execute(text("ANALYZE pgqueue.jobs"))  # and message_queue left as it was
        connection.execute(text("SET LOCAL work_mem = '64kB'"))
        # NOT IN would compare each job with every message: 200 million times here.
        connection.execute(text("SET LOCAL statement_timeout = '60s'"))

        assert connection.execute(invariants.invariant_violations()).all() == []
        view = text("SELECT * FROM pgqueue.invariant_violations")
        assert connection.execute(view).all() == []


IN_FLIGHT = "SELECT * FROM pgqueue.invariant_violations_in_flight"
ONE_RULE = "SELECT * FROM pgqueue.invariant_violations WHERE rule = 'a lease has a job'"


@pytest.mark.parametrize("query", [IN_FLIGHT, ONE_RULE])
def test_what_is_in_flight_is_checked_without_reading_all_jobs(engine: Engine, query: str) -> None:
    with engine.begin() as connection:
        enqueue_many(connection, 20_000)
        connection.execute(text("DELETE FROM pgqueue.message_queue WHERE target_id > 100"))
        explain = f"EXPLAIN (ANALYZE, FORMAT JSON) {query}"
        plan = Plan.of(connection.execute(text(explain)).scalar_one()[0])

    assert plan.scans_of("jobs") <= {"Index Scan jobs_pkey", "Index Only Scan jobs_pkey"}
    read = [node for node in plan.nodes if node.get("Relation Name") == "jobs"]
    assert sum(node["Actual Rows"] * node["Actual Loops"] for node in read) <= 3 * 100


def test_each_rule_is_a_branch_that_a_query_for_another_leaves_out(engine: Engine) -> None:
    with engine.begin() as connection:
        explain = f"EXPLAIN (FORMAT JSON) {ONE_RULE}"
        plan = Plan.of(connection.execute(text(explain)).scalar_one()[0])

    tables = {node["Relation Name"] for node in plan.nodes if "Relation Name" in node}
    assert tables == {"jobs", "leases"}
