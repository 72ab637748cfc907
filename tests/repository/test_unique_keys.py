"""Unique keys under contention: one unfinished job to a key, and an id for every caller."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import (
    PATIENCE,
    run_together,
    violations,
    wait_until,
    waits_for_lock,
    workers_at,
)
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
    engine: Engine, many: bool
) -> None:
    ids: dict[int, set[int]] = defaultdict(set)
    seeds = iter(range(CALLERS))
    pool = create_engine(engine.url, pool_size=CALLERS)

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


def test_a_key_whose_jobs_keep_ending_is_never_held_twice(engine: Engine) -> None:
    pool = create_engine(engine.url, pool_size=8)

    def enqueue() -> None:
        for _ in range(60):
            with Session(pool) as session:
                once.enqueue(session, 1)
                session.commit()

    def work() -> None:
        with workers_at(engine, 1) as [worker]:
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


class Rival:
    """Sets in when a batch looks for the holder of a key that it found taken: ends the holder,
    takes the key, and waits for a later one that the batch has taken."""

    def __init__(self, pool: Engine, batch: Session, holder: int) -> None:
        self._pool = pool
        self._holder = holder
        self.threads = ThreadPoolExecutor()
        self.ids: Future[list[int]] | None = None
        event.listen(batch.connection(), "before_cursor_execute", self._look_out)

    def _look_out(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if self.ids is not None or "has_table_privilege" not in statement:
            return
        with Session(self._pool) as session, session.begin():
            assert queue.cancel(session, self._holder)
        pid: Future[int] = Future()
        self.ids = self.threads.submit(self._enqueue, pid)
        wait_until(lambda: waits_for_lock(self._pool, pid.result(PATIENCE)))

    def _enqueue(self, pid: "Future[int]") -> list[int]:
        with Session(self._pool) as session, session.begin():
            pid.set_result(pid_of(session))
            return once.enqueue_many(session, [(1,), (2,)])

    def result(self) -> list[int]:
        assert self.ids is not None, "the batch has not looked for the holder"
        return self.ids.result(PATIENCE)


def pid_of(session: Session) -> int:
    return session.scalars(text("SELECT pg_backend_pid()")).one()  # type: ignore[no-any-return]  # text() has no types


@pytest.fixture
def pool(database_url: str) -> Iterator[Engine]:
    pool = create_engine(database_url, pool_size=8)
    yield pool
    pool.dispose()


def test_a_batch_that_finds_a_key_taken_does_not_go_back_for_it_when_it_becomes_free(
    engine: Engine, pool: Engine
) -> None:
    with Session(pool) as session, session.begin():
        holder = once.enqueue(session, 1).id
    with Session(pool) as batch:
        rival = Rival(pool, batch, holder)

        first, second = once.enqueue_many(batch, [(1,), (2,)])
        batch.commit()

    assert first == holder
    assert rival.result()[0] != holder
    assert rival.result()[1] == second
    assert violations(engine) == []


def test_a_batch_lets_later_keys_go_to_try_again_for_one_whose_holder_it_never_saw(
    engine: Engine, pool: Engine
) -> None:
    with Session(pool) as blocker, Session(pool) as batch:
        once.enqueue(blocker, 0)
        pid = pid_of(batch)
        waiting = ThreadPoolExecutor().submit(once.enqueue_many, batch, [(0,), (1,), (2,)])
        wait_until(lambda: waits_for_lock(engine, pid))
        # Later than the snapshot of the statement that waits, and gone before it looks.
        with Session(pool) as session, session.begin():
            rival = Rival(pool, batch, once.enqueue(session, 1).id)

        blocker.rollback()
        ids = waiting.result(PATIENCE)
        batch.commit()

    assert ids[1:] == rival.result()
    assert violations(engine) == []


def test_only_the_worker_that_has_the_lease_gives_a_key_back(engine: Engine) -> None:
    def held(connection: Any) -> Any:
        return connection.scalar(text("SELECT held_unique_key FROM pgqueue.jobs"))

    queue.bind(engine)
    once.delay(1)
    with workers_at(engine, 2) as [first, second]:
        [claimed] = first.claim()
        assert not second.attempts.free_key(claimed, in_own_transaction=True)
        assert held(second.line) == "k1"

        assert first.attempts.free_key(claimed, in_own_transaction=True)
        assert first.attempts.free_key(claimed, in_own_transaction=True)

        assert held(second.line) is None
        assert first.settle(claimed, Succeeded())
        assert not first.attempts.free_key(claimed, in_own_transaction=True)
    assert violations(engine) == []
