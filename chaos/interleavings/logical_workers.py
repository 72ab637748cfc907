"""Workers made of nothing but connections: what a real one does to the database, step by step."""

import json
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, inspect, make_url, text
from sqlalchemy.orm import Session

from chaos.workers import wait_until as wait_until  # for its users, too
from pgqueue import Job, JobStatus, PgQueue, Violation
from pgqueue.database.settings import CLAIMING
from pgqueue.handler.transaction import CancelWins, LeasePassedOn, settle_in_transaction
from pgqueue.outcomes import Cancelled, ErrorReport, Exhausted, Outcome
from pgqueue.repository.claim import Claim, ClaimCursor, Claimed
from pgqueue.repository.enqueue import Enqueues, NewJob
from pgqueue.repository.settle import Attempts
from pgqueue.repository.tables import array_of
from pgqueue.repository.workers import Workers
from pgqueue.worker.claiming.cursors import START

T = TypeVar("T")

TASK = "tests.task"
TASKS = array_of([TASK])
ERROR = ErrorReport("ValueError", "planned", "")

# Numbers of seconds after which a test fails instead of hanging.
PATIENCE = 60.0
LOCK_TIMEOUT = "5s"


def worker_settings(url: str | URL, **more: str) -> Engine:
    """An engine whose connections are set up as those of a worker are."""
    settings = {**CLAIMING, "lock_timeout": LOCK_TIMEOUT, **more}
    options = " ".join(
        f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in settings.items()
    )
    return create_engine(make_url(url), connect_args={"options": options}, poolclass=NullPool)


def pairs(queue: str = "default", priorities: Sequence[int] = range(10)) -> list[ClaimCursor]:
    return [ClaimCursor(queue, priority, *START) for priority in priorities]


class LogicalWorker:
    """A registered worker: a row, a presence, and connections of its own."""

    def __init__(self, engine: Engine) -> None:
        self.id = uuid.uuid4()
        self.pids: list[int] = []
        self.identity = self._connect(engine, "AUTOCOMMIT")
        self.line = self._connect(engine, "AUTOCOMMIT")
        self.transaction = self._connect(engine, "READ COMMITTED")
        workers = Workers(self.identity)
        workers.register(self.id, hostname="here", pid=1, queues=["default"], slots=1)
        assert workers.lock_presence(self.id)

    @property
    def attempts(self) -> Attempts:
        """On the connection that claims and settles."""
        return Attempts(self.line, self.id)

    @property
    def attempts_in_transaction(self) -> Attempts:
        return Attempts(self.transaction, self.id)

    def claim(self, limit: int = 1, *, queue: str = "default", **passing: bool) -> list[Claimed]:
        return self.look(limit, queue=queue, **passing).rows

    def claim_new(self, engine: Engine, **options: Any) -> Claimed:
        """Enqueue a job, and claim it."""
        enqueue(engine, **options)
        [claimed] = self.claim()
        return claimed

    def run_next(self, outcome: Outcome) -> Claimed:
        """Claim a job and settle it so."""
        [claimed] = self.claim()
        assert self.settle(claimed, outcome)
        return claimed

    def look(self, limit: int, *, queue: str = "default", **passing: bool) -> Claim:
        return self.attempts.claim(pairs(queue), tasks=TASKS, limit=limit, **passing)

    def settle(self, claimed: Claimed, outcome: Outcome) -> bool:
        """Settle one attempt; whether it was accepted."""
        return bool(self.attempts.settle([(claimed, outcome)]))

    def claim_in_transaction(self, limit: int = 1, *, queue: str = "default") -> list[Claimed]:
        """Claim in T, which stays open, as ``queue.claim()`` does."""
        attempts = self.attempts_in_transaction
        return attempts.claim(pairs(queue), tasks=TASKS, limit=limit).rows

    def settle_in_transaction(self, claimed: Claimed, outcome: Outcome) -> bool:
        """Settle inside T; False: undo all of it."""
        return settle_in(self.transaction, self.id, claimed, outcome)

    def crash(self, engine: Engine) -> None:
        """Close every connection, and wait until the server has seen it."""
        for connection in (self.identity, self.line, self.transaction):
            connection.connection.dbapi_connection.close()  # type: ignore[union-attr]  # it is open
            connection.invalidate()
            connection.close()
        alive = text("SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(:pids)")
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            wait_until(lambda: connection.scalar(alive, {"pids": self.pids}) == 0)

    def close(self) -> None:
        for connection in (self.identity, self.line, self.transaction):
            connection.close()

    def _connect(self, engine: Engine, isolation_level: Any) -> Connection:
        connection = engine.connect().execution_options(isolation_level=isolation_level)
        self.pids.append(_server_process(connection))
        return connection


def settle_in(
    connection: Connection, worker_id: uuid.UUID, claimed: Claimed, outcome: Outcome
) -> bool:
    """Settle in the transaction of a connection; False: undo all of it."""
    try:
        settle_in_transaction(Attempts(connection, worker_id), claimed, outcome)
    except CancelWins:
        return True
    except LeasePassedOn:
        return False
    return True


def declare_dead(engine: Engine, *dead_workers: LogicalWorker) -> None:
    with engine.begin() as connection:
        workers = Workers(connection)
        ids = {worker.id for worker in dead_workers}
        for member in workers.members():
            if member.id in ids:
                assert workers.declare_dead(member)


def rescue(engine: Engine) -> dict[int, str | None]:
    """Rescue all there is to rescue; the jobs, and how they stand."""
    rescued: dict[int, str | None] = {}
    with engine.begin() as connection:
        while batch := Workers(connection).rescue():
            rescued |= {each.job_id: each.outcome for each in batch}
    return rescued


Executor = Engine | Connection | Session


def enqueue(executor: Executor, *, key: str | None = None, **options: Any) -> int:
    """Enqueue one job through the repository; its id, or that of the job with the key."""
    with _transaction_of(executor) as transaction:
        found = Enqueues(transaction).enqueue(_new_job(options), "{}", unique_key=key)
    return found if isinstance(found, int) else found.id


def enqueue_many(executor: Executor, count: int, **options: Any) -> list[int]:
    with _transaction_of(executor) as transaction:
        documents = json.dumps([{}] * count)
        return Enqueues(transaction).enqueue_chunk(_new_job(options), documents=documents)


def _new_job(options: dict[str, Any]) -> NewJob:
    plain = {"task": TASK, "queue": "default", "priority": 5, "max_attempts": 10, "notify": False}
    return NewJob(**{**plain, **options})


@contextmanager
def _transaction_of(executor: Executor) -> Iterator[Connection | Session]:
    """That of a connection or session; on an engine, one that is committed at the end."""
    if isinstance(executor, Engine):
        with executor.begin() as connection:
            yield connection
    else:
        yield executor


def execute(engine: Engine, statement: str, **parameters: Any) -> None:
    """Change rows by SQL, and commit."""
    committed(engine, lambda connection: connection.execute(text(statement), parameters))


def committed(engine: Engine, act: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call ``act(connection, ...)`` in a transaction, and commit it."""
    with engine.begin() as connection:
        return act(connection, *arguments, **options)


def stored(engine: Engine, table: type[T]) -> list[T]:
    """The rows of a table, in the order of its key."""
    with Session(engine) as session:
        return session.query(table).order_by(*inspect(table).primary_key).all()


def status_of(engine: Engine, job_id: int) -> JobStatus:
    with Session(engine) as session:
        return session.get_one(Job, job_id).status


def violations(engine: Engine) -> list[Violation]:
    with engine.connect() as connection:
        return PgQueue().check(connection)


def drain(engine: Engine, worker: LogicalWorker, outcome: Outcome, *, limit: int = 100) -> int:
    """Claim and settle until nothing is due; how many attempts that took."""
    count = 0
    while claimed := worker.claim(limit):
        count += len(claimed)
        for one in claimed:
            ending = Exhausted() if one.attempt > one.max_attempts else outcome
            assert worker.settle(one, ending) or isinstance(ending, Cancelled)
    return count


def waits_for_lock(engine: Engine, pid: int) -> bool:
    """Whether a server process waits for a lock that another holds."""
    with engine.connect() as connection:
        blockers = text("SELECT cardinality(pg_blocking_pids(:pid)) > 0")
        return bool(connection.scalar(blockers, {"pid": pid}))


@contextmanager
def waiting(engine: Engine, connection: Connection, action: Callable[[], T]) -> Iterator[list[T]]:
    """Run the block while the action, on this connection, waits for a lock; then its result."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(action()))
    pid = _server_process(connection)
    thread.start()
    wait_until(lambda: waits_for_lock(engine, pid))
    yield results
    thread.join()


def _server_process(connection: Connection) -> int:
    return connection.connection.driver_connection.info.backend_pid  # type: ignore[union-attr,no-any-return]  # psycopg's


@contextmanager
def workers_at(engine: Engine, count: int, **settings: str) -> Iterator[list[LogicalWorker]]:
    """So many workers at the database of an application's engine, closed at the end."""
    own = worker_settings(engine.url, **settings)
    if hasattr(engine.dialect, "default_isolation_level"):  # it has connected
        own.dialect, own._compiled_cache = engine.dialect, engine._compiled_cache
    with logical_workers(own, count) as workers:
        yield workers


@contextmanager
def logical_workers(engine: Engine, count: int) -> Iterator[list[LogicalWorker]]:
    """So many workers on an engine with the settings of a worker, closed at the end."""
    workers = [LogicalWorker(engine) for _ in range(count)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()


def run_together(
    *actions: Callable[[], None], background: Sequence[Callable[[], None]] = ()
) -> None:
    """Start all at once, each in a thread; fails with the first error that any of them has.

    Those in the background are repeated until the others have ended.
    """
    start = threading.Barrier(len(actions) + len(background))
    ended = threading.Event()
    errors: list[BaseException] = []

    def run(action: Callable[[], None], *, again: bool) -> None:
        try:
            start.wait(PATIENCE)
            action()
            while again and not ended.is_set():
                action()
        except BaseException as error:  # carried over to the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=[one], kwargs={"again": False}) for one in actions]
    others = [
        threading.Thread(target=run, args=[one], kwargs={"again": True}) for one in background
    ]
    for thread in (*threads, *others):
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
