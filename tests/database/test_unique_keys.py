"""Unique keys under contention: one unfinished job to a key, and an id for every caller."""

import random
from collections import Counter, defaultdict

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from chaos.logical import crew, run_together, violations, worker_settings
from pgqueue import PgQueue
from pgqueue.outcomes import Succeeded

queue = PgQueue()
KEYS = 5
ROUNDS = 25
CALLERS = 16


@queue.task(name="tests.task", unique_key=lambda n: f"k{n}")
def once(n: int) -> None: ...


@pytest.mark.parametrize("many", [False, True])
def test_of_sixteen_who_enqueue_and_often_roll_back_each_gets_an_id(
    engine: Engine, database_url: str, many: bool
) -> None:
    ids: dict[int, set[int]] = defaultdict(set)
    seeds = iter(range(CALLERS))
    pool = create_engine(database_url, pool_size=CALLERS)

    def enqueue() -> None:
        chance = random.Random(next(seeds))
        for _ in range(ROUNDS):
            keys = chance.sample(range(KEYS), 3 if many else 1)
            with Session(pool) as session:
                if many:
                    found = once.enqueue_many(session, [(key,) for key in keys])
                else:
                    found = [once.enqueue(session, keys[0]).id]
                assert len(found) == len(keys)
                if chance.random() < 0.3:
                    session.rollback()
                    continue
                session.commit()
                for key, id in zip(keys, found, strict=True):
                    ids[key].add(id)

    run_together(*[enqueue] * CALLERS)
    pool.dispose()

    with engine.connect() as connection:
        rows = connection.execute(text("SELECT unique_key, id FROM pgqueue.jobs")).all()
    assert Counter(key for key, _ in rows) == Counter({f"k{key}": 1 for key in ids})
    assert {key: {id} for key, id in rows} == {f"k{key}": found for key, found in ids.items()}
    assert violations(engine) == []


def test_a_key_whose_jobs_keep_ending_is_never_held_twice(
    engine: Engine, database_url: str
) -> None:
    pool = create_engine(database_url, pool_size=8)

    def enqueue() -> None:
        for _ in range(60):
            with Session(pool) as session:
                once.enqueue(session, 1)
                session.commit()

    def work() -> None:
        with crew(worker_settings(database_url), 1) as [worker]:
            for _ in range(20):
                for claimed in worker.claim(5):
                    assert worker.settle(claimed, Succeeded())

    def look() -> None:
        with engine.connect() as connection:
            holders = text("SELECT count(*) FROM pgqueue.jobs WHERE outcome IS NULL")
            assert connection.scalar(holders) in (0, 1)

    run_together(*[enqueue] * 8, background=[work, look])
    pool.dispose()

    assert violations(engine) == []
