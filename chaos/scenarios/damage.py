"""Rows that were written or changed by hand."""

from __future__ import annotations

import json

from sqlalchemy.exc import IntegrityError

from chaos.environment import Environment
from chaos.history import START
from chaos.mutations import Patch, mutation
from chaos.sample_tasks import AT_ONCE, note, queue
from chaos.scenario import Size, scenario
from pgqueue import JobContext

ARGUMENTS = {
    14: f'{{"n": {"1" * 5000}}}',
    23: f'{{"n": {"[" * 3000 + "]" * 3000}}}',
    30: '[{"n": 1}]',
    36: '{"n": {"py/object": "os.system"}}',
    92: "null",
}
"""By their numbers in the list of bad inputs: arguments that cannot be read.  Each fails its own
job; number 21, a key given twice, is as valid as PostgreSQL's jsonb makes it."""

READABLE = {21: '{"n": 1, "n": 2}'}

CHANGES = {
    94: "UPDATE pgqueue.jobs SET run_at = '2026-01-01Z' WHERE id = :id",
    95: "UPDATE pgqueue.jobs SET created_at = '2999-01-01Z' WHERE id = :id",
}
"""Odd, and no harm: the job runs."""

REFUSED = {
    57: "UPDATE pgqueue.message_queue SET run_at = '-infinity' WHERE target_id = :id",
    58: "UPDATE pgqueue.message_queue SET run_at = '10000-01-01Z' WHERE target_id = :id",
    88: "UPDATE pgqueue.jobs SET outcome = 'done', finished_at = now() WHERE id = :id",
    93: "UPDATE pgqueue.message_queue SET attempt = 32767 WHERE target_id = :id",
}
"""What the tables do not take; tests/scenarios/test_damaged_rows.py has all of them."""

WITHOUT_MESSAGE = "DELETE FROM pgqueue.message_queue WHERE target_id = :id"
WITHOUT_JOB = "DELETE FROM pgqueue.jobs WHERE id = :id"
MENDED = """
    INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task)
    SELECT queue, priority, run_at, id, task FROM pgqueue.jobs WHERE id = :id
"""


@queue.task(retry=AT_ONCE)
def take_number(ctx: JobContext, n: int) -> int:
    note(START, ctx, n=n)
    return ctx.attempt


@mutation
def payload_decoded_in_the_claim(patch: Patch) -> None:
    """A claim reads the arguments of all its jobs, not each job its own."""
    from pgqueue.repository import settle

    real = settle.Attempts.claim

    def reading(self, *arguments, **options):  # type: ignore[no-untyped-def]
        claim = real(self, *arguments, **options)
        for row in claim.rows:
            json.loads(row.args)
        return claim

    patch.set(settle.Attempts, "claim", reading)


@scenario(
    promises="P6",
    full=Size(jobs=2000, workers=4, faults=40),
    short=Size(jobs=60, workers=1, faults=1),
    mutated={"payload_decoded_in_the_claim": "a damaged row has ended a worker"},
)
def damaged_rows(environment: Environment, size: Size) -> None:
    """Rows damaged by hand among good jobs: each costs its own job, and no other."""
    environment.sampler.pause()
    good: list[int] = []
    damaged: list[int] = []
    good += environment.enqueue(take_number, [(n,) for n in range(size.jobs // 2)])
    damaged += _damage_arguments(environment, ARGUMENTS, size.faults)
    good += _damage_arguments(environment, READABLE, size.faults)
    for change in CHANGES.values():
        for job in environment.enqueue(take_number, [(1,)] * size.faults):
            environment.execute(change, id=job)
            good.append(job)
    good += environment.enqueue(take_number, [(n,) for n in range(size.jobs // 2)])
    _run(environment, size)
    good.append(_lose_and_mend(environment, size))
    _are_refused(environment)
    started = {event.job for event in environment.history(START)}
    environment.expect(
        not started & set(damaged), "a job has started with arguments it did not get"
    )
    environment.judge(succeeded=len(good), failed=len(damaged))


def _run(environment: Environment, size: Size) -> None:
    workers = environment.workers(size.workers, concurrency=2)

    def all_live() -> None:
        alive = all(member.is_running for member in workers.members)
        environment.expect(alive, "a damaged row has ended a worker")

    environment.until_ended(meanwhile=all_live)
    workers.stop()


def _lose_and_mend(environment: Environment, size: Size) -> int:
    """Numbers 89 and 90: a job without a message is reported, and runs once it has one."""
    [without_message, without_job] = environment.enqueue(take_number, [(1,)] * 2)
    environment.execute(WITHOUT_MESSAGE, id=without_message)
    environment.execute(WITHOUT_JOB, id=without_job)
    environment.acknowledged.discard(without_job)
    environment.count("damaged rows", 2)
    _run(environment, size)
    with environment.queue.session() as session:
        reported = {violation.job_id for violation in environment.queue.check(session)}
    environment.expect(reported == {without_message}, f"the check reports {reported}")
    environment.execute(MENDED, id=without_message)
    _run(environment, size)
    return without_message


def _are_refused(environment: Environment) -> None:
    [job] = environment.enqueue(take_number, [(1,)])
    for number, change in REFUSED.items():
        try:
            environment.execute(change, id=job)
        except IntegrityError:
            continue
        environment.expect(False, f"the tables have taken bad row {number}")
    with environment.queue.session() as session:
        environment.queue.cancel(session, job)
        session.commit()
    environment.acknowledged.discard(job)
    environment.execute("DELETE FROM pgqueue.dead_letters WHERE job_id = :id", id=job)
    environment.execute("DELETE FROM pgqueue.jobs WHERE id = :id", id=job)


def _damage_arguments(environment: Environment, arguments: dict[int, str], times: int) -> list[int]:
    ids = []
    for words in arguments.values():
        for job in environment.enqueue(take_number, [(1,)] * times):
            change = "UPDATE pgqueue.jobs SET args = CAST(:args AS jsonb) WHERE id = :id"
            environment.execute(change, args=words, id=job)
            ids.append(job)
            environment.count("damaged rows")
    return ids
