"""Everything that writes, all at once, on the same few jobs."""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete

from chaos.logical import rescue
from chaos.plants import Patch, plant
from chaos.scenario import Broken, Size, scenario
from chaos.stage import Stage
from chaos.storm import SESSIONS, STRICT, Storm, once
from pgqueue import tasks
from pgqueue.repository import Jobs, NewJob
from pgqueue.statements import operating
from pgqueue.statements.tables import leases


@plant
def enqueues_keys_in_any_order(patch: Patch) -> None:
    """A batch with unique keys is inserted in the order given, not in that of its keys."""

    def in_given_order(jobs: Jobs, new: NewJob, written: Any) -> list[int]:
        keys = written.unique_keys
        return jobs.enqueue_unique_chunk(new, payloads=written.args, keys=keys)

    patch.set(tasks, "_enqueue_unique", in_given_order)


@plant
def goes_back_for_freed_keys(patch: Patch) -> None:
    """A key whose holder has ended meanwhile is inserted while later ones are held."""

    def go_back(self: Any, new: Any, rows: Any) -> list[int]:
        ids = self._enqueue_unless_taken(new, rows)
        while missing := [n for n, id in enumerate(ids) if id is None]:
            again = self._enqueue_unless_taken(new, [rows[n] for n in missing])
            for n, id in zip(missing, again, strict=True):
                ids[n] = id
        return [id for id in ids if id is not None]

    patch.set(Jobs, "_enqueue_in_order", go_back)


@plant
def cancel_waits_for_the_lease(patch: Patch) -> None:
    """A cancel has the job's row and waits for a lease, where all others begin with the lease."""
    left = delete(leases).where(leases.c.target_id == operating.JOB, leases.c.held)
    patch.set(operating, "delete_left_lease", lambda: left)


@scenario(
    promises="P1 P2 P6",
    research="T25",
    full=Size(faults=20, seconds=15),
    long=Size(faults=160, seconds=120),
    short=Size(faults=4, seconds=2),
    planted=dict.fromkeys(
        ("enqueues_keys_in_any_order", "goes_back_for_freed_keys"),
        "deadlock detected|has ended [1-9][0-9]* deadlocks",
    ),
    alone=True,
)
def deadlocks(stage: Stage, size: Size) -> None:
    """A storm of everything on the same few jobs: nobody deadlocks, and nothing is damaged."""
    stage.enqueue(once.options(unique_key=None), [(n,) for n in range(60)])
    fleets = [stage.fleet(mode, 1, poll_interval=0.1) for mode in ("lease", "transaction")]
    for fleet in fleets:
        fleet.until_registered()
    storm = Storm(stage, seconds=size.seconds, rounds=size.faults)
    storm.rage()
    for kind, times in storm.done.items():
        stage.count(kind, times)
    stage.count("replayed", storm.replayed)
    stage.count("sessions", sum(SESSIONS.values()) + len(STRICT))
    stage.expect(not storm.lacks, f"too seldom: {storm.lacks}")
    for fleet in fleets:
        fleet.stop()
    _rescue_all(stage)
    # Of the workers too, which try again what the server has ended.
    found = stage.scalar(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    stage.expect(found == 0, f"the server has ended {found} deadlocks")


def _rescue_all(stage: Stage) -> None:
    """All are gone: what they have left must be sound, and to be taken up again."""
    stage.execute("UPDATE pgqueue.workers SET dead_at = clock_timestamp() WHERE dead_at IS NULL")
    rescue(stage.engine)
    stage.sampler.raise_if_broken()
    with stage.queue.session() as session:
        violations = stage.queue.check(session)
    if violations:
        raise Broken(f"F8: {', '.join(map(str, violations[:5]))}")
