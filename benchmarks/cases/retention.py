"""Deleting ended jobs whose time is over, as workers do, beside the loop that people write."""

from __future__ import annotations

import time

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from benchmarks.arena import Arena, Spoiled
from benchmarks.case import Bench, Finding, Size, case
from benchmarks.cases.unkind import FINISHED, snapshot
from benchmarks.systems import PGQUEUE
from pgqueue import Job, Keep
from pgqueue.database.opening import own_connection
from pgqueue.rules.retention import Retention

OLD = "UPDATE pgqueue.jobs SET created_at = created_at - interval '1 year', "
OLD += "finished_at = finished_at - interval '1 year'"
BY_HAND = 1000
RULES = Retention(Keep(), {}, {"nothing": None})


@case(
    smoke=Size(rows=2_000),
    usual=Size(rows=300_000),
    full=Size(rows=300_000, turns=3),
)
def prune(bench: Bench, size: Size) -> Finding:
    """Prune succeeded jobs whose time is over: steps of one connection, without the rests that a
    worker takes between them; with a snapshot held; and one by one in the ORM."""
    finding = Finding()
    calm: list[float] = []
    held: list[float] = []
    by_hand: list[float] = []
    with bench.arena(PGQUEUE) as arena:
        for _ in range(size.turns):
            _fill(arena, size.rows)
            calm.append(_pruned(arena, size.rows))
            _fill(arena, size.rows)
            with snapshot(arena):
                held.append(_pruned(arena, size.rows))
            _fill(arena, few := min(size.rows, 2_000))
            by_hand.append(_deleted_by_hand(arena, few))
    ours = finding.add("pgqueue", calm, "jobs/s")
    finding.ratio(ours, finding.add("session.delete(job)", by_hand, "jobs/s"))
    finding.ratio(finding.add("snapshot held", held, "jobs/s"), ours)
    return finding


def _fill(arena: Arena, rows: int) -> None:
    arena.tell("empty")
    arena.sql(FINISHED, rows)
    arena.sql(OLD)
    arena.calm()


def _pruned(arena: Arena, rows: int) -> float:
    # Here, because ``--against`` imports all cases into trees that have other names.
    from pgqueue.database.settings import JANITOR
    from pgqueue.worker.duties.prune import PruneRound, RoundState

    prune_round = PruneRound(RULES)
    engine = create_engine(arena.url.replace("postgresql://", "postgresql+psycopg://"))
    with own_connection(engine, JANITOR, isolation_level="READ COMMITTED") as connection:
        began = time.monotonic()
        while prune_round.step(connection) is not RoundState.DONE:
            pass
        rate = rows / (time.monotonic() - began)
    engine.dispose()
    if prune_round.deleted != rows:
        raise Spoiled(f"{prune_round.deleted} of {rows} jobs were pruned")
    return rate


def _deleted_by_hand(arena: Arena, rows: int) -> float:
    engine = create_engine(arena.url.replace("postgresql://", "postgresql+psycopg://"))
    began = time.monotonic()
    for _ in range(0, rows, BY_HAND):
        with Session(engine) as session, session.begin():
            for job in session.query(Job).order_by(Job.id).limit(BY_HAND):
                session.delete(job)
    rate = rows / (time.monotonic() - began)
    engine.dispose()
    return rate
