"""run_jobs: what a worker would do, in the thread and the transaction of a test."""

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Connection, Engine, ForeignKey, func, make_url, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pgqueue import (
    AttemptFailed,
    Job,
    JobAttempt,
    JobContext,
    JobStatus,
    Lease,
    Limit,
    OptionError,
    PgQueue,
    PgQueueError,
    Retry,
    Snooze,
    Unique,
)
from pgqueue.tables import WorkerProcess
from pgqueue.testing import enqueued, run_jobs


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    is_paid: Mapped[bool] = mapped_column(default=False)
    first_id: Mapped[int | None] = mapped_column(
        ForeignKey("orders.id", deferrable=True, initially="DEFERRED")
    )


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    Base.metadata.create_all(engine)
    with engine.connect() as connection, connection.begin() as transaction:
        yield connection
        transaction.rollback()


@pytest.fixture
def queue(connection: Connection) -> PgQueue:
    return PgQueue(connection)


@pytest.fixture
def session(queue: PgQueue) -> Iterator[Session]:
    with queue.session() as session:
        yield session


def test_due_jobs_run_in_order_with_what_they_enqueue(queue: PgQueue, session: Session) -> None:
    ran_in = set()

    @queue.task
    def pay(session: Session, order_id: int) -> str:
        ran_in.add(threading.current_thread())
        session.get_one(Order, order_id).is_paid = True
        session.commit()
        tell.enqueue(session, order_id)
        return "paid"

    @queue.task
    async def tell(session: AsyncSession, order_id: int) -> None:
        order = await session.get_one(Order, order_id)
        assert order.is_paid
        ran_in.add(threading.current_thread())

    order = Order(id=7)
    session.add(order)
    pay.options(priority=9).enqueue(session, 7)
    tell.options(queue="other", delay=timedelta(hours=1)).enqueue(session, 7)

    ran = run_jobs(session, queue=queue)

    assert [(job.task, job.status, job.result) for job in ran] == [
        (pay.name, JobStatus.SUCCEEDED, "paid"),
        (tell.name, JobStatus.SUCCEEDED, None),
    ]
    assert order.is_paid
    assert ran_in == {threading.current_thread()}
    assert [job.queue for job in enqueued(session)] == ["other"]
    assert queue.check(session) == []
    assert [session.scalars(select(table)).all() for table in (Lease, WorkerProcess)] == [[], []]


def test_a_whole_workflow_runs_with_what_waits_for_what(queue: PgQueue, session: Session) -> None:
    seen: list[object] = []

    @queue.task(name="part")
    def part(number: int) -> int:
        return number

    @queue.task(name="split")
    def split(session: Session, ctx: JobContext) -> None:
        with queue.extend_workflow(
            session, ctx.workflow_id, before_successors_of=ctx.job_id
        ) as flow:
            flow.add_many(part, [(1,), (2,)])

    @queue.task(name="gather")
    def gather(ctx: JobContext) -> list[int]:
        return ctx.gather("parts", [part.job(3), part.job(4)])

    @queue.task(name="load", max_attempts=1)
    def load(session: Session, ctx: JobContext) -> None:
        seen.append(list(queue.results(session, ctx.job_id, gather)))
        raise ValueError("planned")

    @queue.task(name="note")
    def note(word: str) -> None:
        seen.append(word)

    @queue.task(name="tell")
    def tell(session: Session, workflow_id: int) -> None:
        seen.append(queue.get_batch(session, workflow_id).outcome)

    with queue.workflow(session, on_success=tell, on_failure=tell) as flow:
        pieces = flow.add(split.job())
        gathered = flow.add(gather.job(), after=pieces)
        loaded = flow.add(load.job(), after=[pieces, gathered])
        skipped = flow.add(note.job("skipped"), after=loaded)
        flow.add(note.job("cleaned"), after=loaded, when="failed")

    ran = run_jobs(session, queue=queue, raise_errors=False)

    assert [job.task for job in ran] == [
        "split", "part", "part", "gather", "part", "part", "gather", "load", "note", "tell"
    ]  # fmt: skip
    assert seen == [[[3, 4]], "cleaned", "failed"]
    assert skipped.last_error == f"skipped: job {loaded.id} has failed"
    assert queue.check(session) == []


def test_an_async_handler_has_steps_and_receives_signals(queue: PgQueue, database_url: str) -> None:
    received: list[object] = []

    @queue.task
    async def part(session: AsyncSession, number: int) -> int:
        return number

    async def double(session: AsyncSession, number: int) -> int:
        return 2 * number

    @queue.task
    async def steps(ctx: JobContext) -> None:
        doubled = await ctx.step_async("double", double, 4)
        await ctx.sleep_async("sleep", timedelta(hours=1))
        parts = await ctx.gather_async("parts", [part.job(1), part.job(2)])
        paid = await ctx.wait_for_async("paid", 7)
        received.extend([doubled, parts, paid])

    async def run() -> None:
        engine = create_async_engine(make_url(database_url).set(drivername="postgresql+asyncpg"))
        async with AsyncSession(engine) as session:
            await steps.enqueue_async(session)
            await session.run_sync(run_jobs, queue=queue, until=timedelta(hours=2))
            await session.run_sync(queue.signal, "paid", 7, "by card")
            await session.run_sync(run_jobs, queue=queue)
            await session.rollback()
        await engine.dispose()

    asyncio.run(run())
    assert received == [8, [1, 2], "by card"]


def test_nothing_escapes_the_rollback(engine: Engine, queue: PgQueue, session: Session) -> None:
    @queue.task
    def add(session: Session, order_id: int) -> None:
        session.add(Order(id=order_id))
        session.commit()

    @queue.task
    def add_alone(order_id: int) -> None:
        with queue.session() as own, own.begin():
            own.add(Order(id=order_id))

    @queue.task
    async def add_async(session: AsyncSession, order_id: int) -> None:
        session.add(Order(id=order_id))

    add.delay(1)
    add_alone.delay(2)
    add_async.enqueue(session, 3)
    run_jobs(session, queue=queue)
    add(4)  # a plain call
    session.commit()

    assert session.scalars(select(Order.id).order_by(Order.id)).all() == [1, 2, 3, 4]
    with Session(engine) as other:
        assert [other.scalar(select(func.count()).select_from(t)) for t in (Order, Job)] == [0, 0]


def test_an_error_is_raised_as_it_is_after_its_attempt_is_settled(
    queue: PgQueue, session: Session
) -> None:
    @queue.task(retry=Retry.constant(timedelta(minutes=5)), max_attempts=2)
    def fail(session: Session) -> None:
        session.add(Order(id=1))
        session.flush()
        raise LookupError("no such card")

    job = fail.enqueue(session)

    with pytest.raises(LookupError, match="no such card"):
        run_jobs(session, queue=queue)

    assert (job.status, job.attempts) == (JobStatus.PENDING, 1)
    assert session.scalars(select(Order)).all() == []
    assert session.scalars(select(JobAttempt.error)).all() == ["no such card"]
    assert run_jobs(session, queue=queue) == []  # its retry is in five minutes
    ran = run_jobs(session, until=timedelta(minutes=5), queue=queue, raise_errors=False)
    assert ran == [job]
    assert job.status is JobStatus.FAILED


def test_arguments_of_another_version_are_an_error_although_their_job_waits(
    queue: PgQueue, session: Session
) -> None:
    @queue.task
    def count(number: int) -> None: ...

    job = count.enqueue(session, 1)
    session.execute(text("""UPDATE pgqueue.jobs SET args = '{"number": 1, "added": 2}'"""))

    with pytest.raises(AttemptFailed, match=r"was not started: .* name 'added'"):
        run_jobs(session, queue=queue)

    assert (job.status, job.attempts) == (JobStatus.PENDING, 0)


def test_arguments_that_cannot_be_read_are_an_error(queue: PgQueue, session: Session) -> None:
    @queue.task
    def count(number: int) -> None: ...

    count.enqueue(session, 1)
    session.execute(text("""UPDATE pgqueue.jobs SET args = '{"number": "x"}'"""))

    with pytest.raises(AttemptFailed, match="PayloadError"):
        run_jobs(session, queue=queue)


def test_a_deferred_constraint_fails_the_job_and_not_the_transaction(
    queue: PgQueue, session: Session
) -> None:
    @queue.task
    def copy(session: Session) -> None:
        session.add(Order(id=1, first_id=99))

    job = copy.enqueue(session)

    with pytest.raises(IntegrityError):
        run_jobs(session, queue=queue)

    assert job.status is JobStatus.PENDING
    assert session.scalars(select(Order)).all() == []


def test_until_runs_the_future_in_the_order_of_its_times(queue: PgQueue, session: Session) -> None:
    seen: list[str] = []

    @queue.task
    def note(word: str) -> None:
        seen.append(word)

    @queue.task
    def tick(session: Session) -> None:
        seen.append("tick")
        tick.options(delay=timedelta(hours=1)).enqueue(session)

    @queue.task
    def wait(ctx: JobContext) -> Snooze | None:
        seen.append("snooze")
        return Snooze(timedelta(hours=1)) if seen.count("snooze") < 2 else None

    now = datetime.now(UTC)
    later = note.options(run_at=now + timedelta(days=2)).enqueue(session, "too late")
    due_at = later.run_at
    note.options(delay=timedelta(hours=3, minutes=30), priority=0).enqueue(session, "half past 3")
    note.options(delay=timedelta(minutes=30)).enqueue(session, "half past 0")
    tick.enqueue(session)
    wait.options(delay=timedelta(minutes=90)).enqueue(session)

    run_jobs(session, until=now + timedelta(hours=4), queue=queue)

    assert seen == [
        "tick", "half past 0", "tick", "snooze", "tick", "snooze", "tick", "half past 3"
    ]  # fmt: skip
    assert later.run_at == due_at
    (next_tick,) = enqueued(session, tick)
    assert timedelta(hours=3, minutes=59) < next_tick.run_at - now < timedelta(hours=4, minutes=5)
    assert queue.check(session) == []
    assert [job.id for job in run_jobs(session, until=timedelta(days=1), queue=queue)] != []
    assert [job.status for job in enqueued(session, note)] == [JobStatus.PENDING]


def test_until_counts_the_delay_of_a_job_that_waits_for_another_from_its_enqueue(
    queue: PgQueue, session: Session
) -> None:
    seen: list[str] = []

    @queue.task
    def note(word: str) -> None:
        seen.append(word)

    note.options(delay=timedelta(hours=4)).enqueue(session, "4")
    with queue.workflow(session) as flow:
        first = flow.add(note.options(delay=timedelta(hours=2)).job("2"))
        flow.add(note.options(delay=timedelta(hours=3)).job("3"), after=first)
        last = flow.add(note.options(delay=timedelta(hours=6)).job("6"), after=first)
    due_at = last.run_at

    run_jobs(session, until=timedelta(hours=5), queue=queue)

    assert seen == ["2", "3", "4"]
    assert abs(last.run_at - due_at) < timedelta(milliseconds=1)


def test_jobs_under_limits_are_admitted_and_run_in_their_order(
    queue: PgQueue, session: Session
) -> None:
    seen: list[str] = []

    @queue.task(limit=Limit(1, by="key", order="strict"))
    def note(key: str, word: str) -> Snooze | None:
        seen.append(word)
        return Snooze(timedelta(hours=1)) if seen == ["a", "b"] else None

    for word in "abc":
        note.enqueue(session, "one", word)
    note.options(delay=timedelta(minutes=30)).enqueue(session, "other", "later")
    assert {job.status for job in enqueued(session, note)} == {JobStatus.BLOCKED}

    assert len(run_jobs(session, queue=queue)) == 2
    assert seen == ["a", "b"]
    assert queue.check(session) == []
    run_jobs(session, queue=queue, until=timedelta(hours=2))

    assert seen == ["a", "b", "later", "b", "c"]
    assert queue.check(session) == []


def test_a_session_of_the_engine_needs_no_bound_queue(engine: Engine) -> None:
    """An application's queue stays bound to its engine; only what the session does is in it."""
    Base.metadata.create_all(engine)
    queue = PgQueue(sessionmaker(engine, expire_on_commit=False))

    @queue.task
    def add(session: Session) -> None:
        session.add(Order(id=1))

    with queue.session() as session:
        add.enqueue(session)
        assert [job.status for job in run_jobs(session, queue=queue)] == [JobStatus.SUCCEEDED]
        assert session.get(Order, 1) is not None
        session.rollback()
        assert session.get(Order, 1) is None


def test_a_test_may_enqueue_under_the_key_of_a_job_that_has_run_and_goes_on(
    queue: PgQueue, session: Session
) -> None:
    @queue.task(unique_key=lambda: "one")
    def wait() -> Snooze:
        return Snooze(timedelta(hours=1))

    job = wait.enqueue(session)
    run_jobs(session, queue=queue)

    assert wait.enqueue(session).id == job.id  # a handler would get DuplicateJob


def test_run_gives_the_arguments_as_a_worker_reads_them(queue: PgQueue, session: Session) -> None:
    @queue.task
    def add(session: Session, ctx: JobContext, order_ids: tuple[int, ...]) -> object:
        session.add_all(Order(id=order_id) for order_id in order_ids)
        return order_ids, ctx.session is session

    assert add.run(session, (1, 2)) == ((1, 2), True)
    assert session.scalar(select(func.count()).select_from(Order)) == 2
    assert session.scalar(select(func.count()).select_from(Job)) == 0


def test_run_gives_the_meta_of_the_options(queue: PgQueue, session: Session) -> None:
    @queue.task
    def tenant(ctx: JobContext) -> object:
        return ctx.meta["tenant"]

    assert tenant.options(meta={"tenant": "acme"}).run(session) == "acme"


def test_the_queue_must_be_named_if_there_are_several(queue: PgQueue, session: Session) -> None:
    other = PgQueue()
    for each in (queue, other):
        each.task(name="same")(print_nothing)

    with pytest.raises(PgQueueError, match=r"PgQueues with tasks: name the one"):
        run_jobs(session)


def print_nothing() -> None: ...


def test_a_job_gives_its_key_back_before_its_handler_and_keeps_it_free_if_it_fails(
    queue: PgQueue, session: Session
) -> None:
    seen: list[tuple[int, bool]] = []

    @queue.task(unique=Unique(by=(), until="started"), retry=Retry.never())
    def go_on(session: Session, left: int) -> None:
        if left:
            seen.append((left, go_on.enqueue(session, left - 1).is_new))
        else:
            raise ValueError("the last one")

    last = go_on.enqueue(session, 2)
    ran = run_jobs(session, queue=queue, raise_errors=False)

    assert seen == [(2, True), (1, True)]
    assert ran[0] == last
    assert [job.held_unique_key for job in ran] == [None] * 3
    assert go_on.enqueue(session, 0).is_new


def test_a_job_that_is_run_too_late_is_cancelled(queue: PgQueue, session: Session) -> None:
    called: list[int] = []

    @queue.task(expires_in=timedelta(hours=1))
    def in_time(n: int) -> None:
        called.append(n)

    late = in_time.enqueue(session, 1)
    for table in ("jobs", "message_queue"):
        move = f"UPDATE pgqueue.{table} SET run_at = run_at - interval '2 hours'"
        session.execute(text(move))
    in_time.enqueue(session, 2)

    assert run_jobs(session, queue=queue)[0] == late
    assert (late.status, called) == (JobStatus.CANCELLED, [2])


def test_a_paused_task_waits_under_all_its_names(queue: PgQueue, session: Session) -> None:
    ran: list[str] = []

    @queue.task(name="new", aliases=("old",))
    def renamed(word: str) -> None:
        ran.append(word)

    @queue.task(name="other")
    def other() -> None:
        ran.append("other")

    queue.pause_task(session, "new")
    renamed.enqueue(session, "by name")
    waiting = renamed.enqueue(session, "by alias")
    for table, condition in (("jobs", "id"), ("message_queue", "target_id")):
        session.execute(
            text(f"UPDATE pgqueue.{table} SET task = 'old' WHERE {condition} = {waiting.id}")
        )
    other.enqueue(session)

    run_jobs(session, queue=queue)
    assert ran == ["other"]

    queue.resume_task(session, renamed.name)
    run_jobs(session, queue=queue)
    assert ran == ["other", "by name", "by alias"]


def test_what_cannot_be_a_task_is_not_paused(queue: PgQueue, session: Session) -> None:
    for name in ("", "two words", None, 7):
        with pytest.raises(OptionError, match="is not the name of a task"):
            queue.pause_task(session, name)  # type: ignore[arg-type]
