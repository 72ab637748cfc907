"""Everything that writes, all at once, on the same few jobs."""

from __future__ import annotations

from typing import Any

from chaos.broken import Broken
from chaos.environment import Environment
from chaos.interleavings.logical_workers import rescue
from chaos.mutations import Patch, mutation
from chaos.scenario import Size, scenario
from chaos.stress import SESSIONS, STRICT, Storm, once
from pgqueue.repository.enqueue import Enqueues, NewJob
from pgqueue.tasks import task


@mutation
def enqueues_keys_in_any_order(patch: Patch) -> None:
    """A batch with unique keys is inserted in the order given, not in that of its keys."""

    def in_given_order(connection: Any, new: NewJob, rows: Any, *_: Any) -> list[int]:
        return [job.id for job in Enqueues(connection).enqueue_keyed_chunk(new, rows)]

    patch.set(task, "_enqueue_unique", in_given_order)


@scenario(
    promises="P1 P2 P6",
    full=Size(faults=20, seconds=15),
    long=Size(faults=160, seconds=120),
    short=Size(faults=4, seconds=2),
    mutated={
        "enqueues_keys_in_any_order": "deadlock detected|has ended [1-9][0-9]* deadlocks",
    },
    alone=True,
)
def deadlocks(environment: Environment, size: Size) -> None:
    """A storm of everything on the same few jobs: nobody deadlocks, and nothing is damaged."""
    environment.enqueue(once.options(unique_key=None), [(n,) for n in range(60)])
    workers = environment.workers(2, poll_interval=0.1)
    workers.until_registered()
    storm = Storm(environment, seconds=size.seconds, rounds=size.faults)
    storm.rage()
    for kind, times in storm.done.items():
        environment.count(kind, times)
    environment.count("replayed", storm.replayed)
    environment.count("sessions", sum(SESSIONS.values()) + len(STRICT))
    environment.expect(not storm.lacks, f"too seldom: {storm.lacks}")
    workers.stop()
    _rescue_all(environment)
    # Of the workers too, which try again what the server has ended.
    found = environment.scalar(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    environment.expect(found == 0, f"the server has ended {found} deadlocks")


def _rescue_all(environment: Environment) -> None:
    """All are gone: what they have left must be sound, and to be taken up again."""
    environment.execute(
        "UPDATE pgqueue.workers SET dead_at = clock_timestamp() WHERE dead_at IS NULL"
    )
    rescue(environment.engine)
    environment.sampler.raise_if_broken()
    with environment.queue.session() as session:
        violations = environment.queue.check(session)
    if violations:
        raise Broken(f"F8: {', '.join(map(str, violations[:5]))}")
