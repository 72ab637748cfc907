"""Unique jobs: what an enqueue does about the job that holds its key."""

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import key_contest
import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import ORMExecuteState, Session, with_loader_criteria

from pgqueue import (
    DuplicateJob,
    Job,
    JobStatus,
    MessageQueue,
    NoTransaction,
    OptionError,
    PgQueue,
    Unique,
    Worker,
)
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.listing import Listing
from pgqueue.repository.rescue import Rescues

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
queue = PgQueue()


@queue.task(name="tests.show", unique=Unique(by=("page",), until="started", on_conflict="replace"))
def show(page: int, text: str = "") -> None: ...


@queue.task(name="tests.send", unique=Unique(by=("page",), on_conflict="postpone"))
def send(page: int, text: str = "") -> None: ...


@queue.task(name="tests.other", unique=Unique(key="shared", until="started"))
def other() -> None: ...


@pytest.fixture(autouse=True)
def _bound(engine: Engine) -> Iterator[None]:
    queue.bind(engine)
    yield
    with queue.session() as session:
        assert queue.check(session) == []


def in_an_hour(task: Any) -> Any:
    return task.options(delay=HOUR)


def message_of(session: Session, job: Job) -> MessageQueue | None:
    session.expire_all()
    return session.query(MessageQueue).filter_by(target_id=job.id).one_or_none()


def let_start(session: Session, job: Job) -> None:
    """Take the job's message and give it a lease, as a claim does."""
    session.execute(
        text(
            "WITH worker AS (INSERT INTO pgqueue.workers (id, hostname, pid, backend_pid, queues,"
            " slots) VALUES (gen_random_uuid(), 'h', 1, 1, '[]', 1) RETURNING id),"
            " message AS (DELETE FROM pgqueue.message_queue WHERE target_id = :id"
            " RETURNING id, target_id)"
            " INSERT INTO pgqueue.leases (target_id, message_id, attempt, worker_id)"
            " SELECT message.target_id, message.id, 1, worker.id FROM message, worker"
        ),
        {"id": job.id},
    )
    session.commit()


def test_replace_gives_the_waiting_job_the_last_arguments_and_the_last_time(
    session: Session,
) -> None:
    first = in_an_hour(show).options(tags=["old"], meta={"by": "Ada"}).enqueue(session, 1, "first")
    session.commit()
    created_at, before = first.created_at, first.run_at

    again = show.options(delay=2 * HOUR, priority=2, tags=["new"]).enqueue(session, 1, "last")
    session.commit()

    assert again is first
    assert not again.is_new
    assert (again.args, again.priority) == ({"page": 1, "text": "last"}, 2)
    assert (again.tags, again.meta) == (["new"], None)
    assert again.created_at == created_at
    assert timedelta(minutes=59) < again.run_at - before < timedelta(minutes=61)
    message = message_of(session, again)
    assert message is not None
    assert (message.run_at, message.priority) == (again.run_at, 2)


def test_replace_may_bring_a_job_forward(session: Session) -> None:
    in_an_hour(show).enqueue(session, 1, "first")

    again = show.enqueue(session, 1, "now")

    assert session.scalar(text("SELECT run_at <= clock_timestamp() FROM pgqueue.jobs"))
    assert again.args["text"] == "now"


def test_postpone_keeps_the_first_arguments_and_moves_the_time(session: Session) -> None:
    first = in_an_hour(send).options(tags=["kept"]).enqueue(session, 1, "first")
    before = first.run_at

    again = send.options(delay=2 * HOUR).enqueue(session, 1, "last")

    assert (again.id, again.is_new) == (first.id, False)
    assert (again.args["text"], again.tags) == ("first", ["kept"])
    assert again.run_at - before > timedelta(minutes=59)


@pytest.mark.parametrize("on_conflict", ["replace", "postpone"])
def test_at_most_bounds_how_far_a_job_is_moved(session: Session, on_conflict: Any) -> None:
    unique = Unique(by=("page",), on_conflict=on_conflict, at_most=2 * HOUR)
    task = send.options(unique=unique, delay=HOUR)
    first = task.enqueue(session, 1, "first")

    for number in range(3):
        again = task.options(delay=(2 + number) * HOUR).enqueue(session, 1, str(number))

    assert again.run_at - first.created_at == 2 * HOUR
    assert again.args["text"] == ("2" if on_conflict == "replace" else "first")


def test_a_job_that_cannot_be_postponed_further_is_not_locked(
    session: Session, engine: Engine
) -> None:
    unique = Unique(by=("page",), on_conflict="postpone", at_most=HOUR)
    task = send.options(unique=unique, delay=HOUR)
    job = task.enqueue(session, 1)
    task.enqueue(session, 1)
    session.commit()

    assert task.enqueue(session, 1).id == job.id
    with engine.connect() as worker:
        for table in ("message_queue", "jobs"):
            lock = f"SELECT count(*) FROM (SELECT FROM pgqueue.{table} FOR UPDATE SKIP LOCKED) x"
            assert worker.scalar(text(lock)) == 1


def test_with_until_started_a_job_that_has_started_gives_its_key_to_a_new_job(
    session: Session,
) -> None:
    first = show.enqueue(session, 1, "first")
    session.commit()
    let_start(session, first)

    second = in_an_hour(show).enqueue(session, 1, "second")
    session.commit()

    assert second.is_new
    assert second.id != first.id
    assert (first.args["text"], first.held_unique_key) == ("first", None)
    assert in_an_hour(show).enqueue(session, 1, "third").id == second.id


@pytest.mark.parametrize("on_conflict", ["replace", "postpone"])
def test_with_until_finished_a_job_that_has_started_refuses_a_change(
    session: Session, on_conflict: Any
) -> None:
    task = send.options(unique=Unique(by=("page",), on_conflict=on_conflict))
    first = task.enqueue(session, 1, "first")
    session.commit()
    let_start(session, first)

    with pytest.raises(DuplicateJob, match=f"job {first.id} of queue .* has started") as raised:
        task.enqueue(session, 1, "lost")
    with pytest.raises(DuplicateJob):
        task.enqueue_many(session, [(0, "also undone"), (1, "lost")])

    assert raised.value.holder == first.id
    session.commit()
    assert session.query(Job).count() == 1
    assert task.enqueue(session, 2).is_new


def test_the_job_of_another_task_is_never_changed(session: Session) -> None:
    holder = other.enqueue(session)
    unique = Unique(key="shared", until="started", on_conflict="replace")

    with pytest.raises(DuplicateJob, match="of another task") as raised:
        show.options(unique=unique).enqueue(session, 1, "mine")

    assert raised.value.holder == holder.id
    session.refresh(holder)
    assert (holder.args, holder.held_unique_key) == ({}, "shared")


def test_a_job_that_waits_for_its_retry_can_be_replaced_and_keeps_its_attempts(
    session: Session,
) -> None:
    job = in_an_hour(send).enqueue(session, 1, "first")
    session.execute(text("UPDATE pgqueue.message_queue SET attempt = 3, crashes = 1, alone = true"))
    session.execute(text("UPDATE pgqueue.jobs SET attempts = 3"))

    send.options(unique=Unique(by=("page",), on_conflict="replace")).enqueue(session, 1, "last")

    message = message_of(session, job)
    assert message is not None
    assert (message.attempt, message.crashes, message.alone) == (3, 1, True)
    assert (job.args["text"], job.attempts) == ("last", 3)


@pytest.mark.parametrize(("on_conflict", "winner"), [("replace", "c"), ("postpone", "a")])
def test_rows_of_one_key_in_one_call_become_one_job(
    session: Session, on_conflict: Any, winner: str
) -> None:
    task = send.options(unique=Unique(by=("page",), on_conflict=on_conflict), delay=HOUR)

    ids = task.enqueue_many(session, [(1, "a"), (2, "x"), (1, "b"), (1, "c")])

    assert ids[0] == ids[2] == ids[3] != ids[1]
    assert session.get_one(Job, ids[0]).args["text"] == winner
    assert session.query(Job).count() == session.query(MessageQueue).count() == 2


def test_many_rows_are_enqueued_and_replaced_in_few_statements(
    session: Session, engine: Engine
) -> None:
    task = in_an_hour(show)
    old = task.enqueue_many(session, [(n, "old") for n in range(0, 200, 2)])
    session.commit()
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))

    ids = task.enqueue_many(session, [(n, "new") for n in range(200)])
    session.commit()

    assert len([each for each in sent if "pgqueue" in each]) == 2
    assert set(old) < set(ids)
    assert len(set(ids)) == 200
    assert {job.args["text"] for job in session.query(Job)} == {"new"}


def test_rows_without_a_key_are_enqueued_beside_the_others(session: Session) -> None:
    unique = Unique(key=lambda page: f"p{page}" if page else None, on_conflict="replace")
    task = send.options(unique=unique)

    first = task.enqueue_many(session, [(0, "a"), (1, "b"), (0, "c")])
    again = task.enqueue_many(session, [(0, "d"), (1, "e")])

    assert len(set(first)) == 3
    assert again[0] not in first
    assert again[1] == first[1]
    assert [session.get_one(Job, id).args["text"] for id in first] == ["a", "e", "c"]


def test_delay_replaces_in_a_transaction_of_its_own(session: Session) -> None:
    first = in_an_hour(show).delay(1, "first")
    again = in_an_hour(show).delay(1, "last")

    assert (first.is_new, again.is_new, again.id) == (True, False, first.id)
    assert (again.args["text"], again.queue) == ("last", "default")
    assert session.get_one(Job, first.id).args["text"] == "last"


def test_enqueue_async_replaces(database_url: str) -> None:
    async def replace() -> list[Any]:
        engine = create_async_engine(database_url)
        async with AsyncSession(engine, expire_on_commit=False) as session, session.begin():
            await in_an_hour(show).enqueue_async(session, 1, "first")
            job = await in_an_hour(show).enqueue_async(session, 1, "last")
        await engine.dispose()
        return [job.is_new, job.args["text"]]

    assert asyncio.run(replace()) == [False, "last"]


def test_add_refuses_what_it_cannot_do(session: Session) -> None:
    with pytest.raises(OptionError, match=r"cannot change another job.*use enqueue"):
        show.job(1)
    job = show.options(unique=Unique(by=("page",), until="started")).job(1)
    session.add(job)
    session.flush()
    assert job.held_unique_key == job.unique_key


def test_autocommit_is_refused_because_a_change_takes_several_statements(engine: Engine) -> None:
    with (
        Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session,
        pytest.raises(NoTransaction, match=r"'replace': .* or another on_conflict"),
    ):
        show.enqueue(session, 1)


@pytest.mark.parametrize("on_conflict", ["return", "replace"])
def test_delay_needs_no_second_try_whatever_the_level_of_the_engine(
    database_url: str, session: Session, on_conflict: Any
) -> None:
    engine = create_engine(database_url, isolation_level="SERIALIZABLE", pool_size=8)
    strict = PgQueue(engine)

    @strict.task(name="tests.strict", unique=Unique(by=(), on_conflict=on_conflict))
    def task(client: int) -> None: ...

    together = threading.Barrier(8)

    def ask(client: int) -> None:
        together.wait(60)
        for _ in range(10):
            with suppress(DuplicateJob):
                in_an_hour(task).delay(client)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [None] * 8
    engine.dispose()
    assert session.query(Job).count() == 1


def test_delay_replaces_also_by_an_engine_in_autocommit(database_url: str) -> None:
    engine = create_engine(database_url, isolation_level="AUTOCOMMIT")
    plain = PgQueue(engine)

    @plain.task(name="tests.plain", unique=Unique(by=(), on_conflict="replace"))
    def task(n: int) -> None: ...

    first = in_an_hour(task).delay(1)

    assert (in_an_hour(task).delay(2).id, plain.engine) == (first.id, engine)
    engine.dispose()


def delete_when_looked_up(engine: Engine, other: Engine) -> list[str]:
    """Let another transaction delete all jobs right before the first one is loaded."""
    seen: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def delete(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        is_load = "FROM pgqueue.jobs" in statement and "WHERE pgqueue.jobs.id =" in statement
        if is_load and not seen:
            seen.append(statement)
            with other.begin() as connection:
                connection.execute(text("DELETE FROM pgqueue.message_queue"))
                connection.execute(text("DELETE FROM pgqueue.jobs"))

    return seen


@pytest.mark.parametrize("how", ["enqueue", "delay", "delay in a period", "postpone"])
def test_a_holder_that_is_deleted_before_it_is_returned_leaves_its_key_to_a_new_job(
    database_url: str, engine: Engine, how: str
) -> None:
    mine = create_engine(database_url)
    own = PgQueue(mine)
    unique = Unique(by=())
    if how == "postpone":
        unique = Unique(by=(), on_conflict="postpone", at_most=HOUR)
    if how == "delay in a period":
        unique = Unique(by=(), period=36_500 * DAY)

    @own.task(name="tests.brief", unique=unique, keep=timedelta(0))
    def brief() -> None: ...

    task = brief.options(delay=2 * HOUR)
    first, key = (job := task.delay()).id, job.unique_key
    if how == "postpone":
        task.delay()  # as far as it may be moved
    seen = delete_when_looked_up(mine, engine)
    if how.startswith("delay"):
        job = task.delay()
    else:
        with Session(mine, expire_on_commit=False) as session, session.begin():
            job = task.enqueue(session)

    assert seen
    assert (job.is_new, job.id != first, job.unique_key) == (True, True, key)
    mine.dispose()


@pytest.mark.parametrize("how", ["enqueue", "delay", "delay in a period", "postpone"])
def test_a_holder_that_the_session_hides_is_looked_up_some_times_and_not_for_ever(
    database_url: str, how: str
) -> None:
    mine = create_engine(database_url)
    own = PgQueue(mine)
    conflict: Any = "postpone" if how == "postpone" else "return"

    period = 36_500 * DAY if how == "delay in a period" else None

    @own.task(name="tests.hidden", unique=Unique(by=(), period=period, on_conflict=conflict))
    def hidden() -> None: ...

    task = in_an_hour(hidden)
    key = re.escape(task.delay().unique_key or "")
    lookups: list[object] = []

    def hide(state: ORMExecuteState) -> None:
        lookups.append(state)
        assert len(lookups) <= 100
        state.statement = state.statement.options(with_loader_criteria(Job, Job.id < 0))

    event.listen(Session, "do_orm_execute", hide)
    try:
        with Session(mine) as session:
            words = f"the unique key '{key}' .* a job this transaction cannot see"
            with pytest.raises(DuplicateJob, match=words):
                task.delay() if how.startswith("delay") else task.enqueue(session)
    finally:
        event.remove(Session, "do_orm_execute", hide)
    mine.dispose()


def test_an_enqueue_waits_for_another_transaction_no_longer_than_lock_timeout(
    session: Session, engine: Engine
) -> None:
    in_an_hour(show).enqueue(session, 1, "first")

    with Session(engine) as second:
        second.execute(text("SET LOCAL lock_timeout = '50ms'"))
        savepoint = second.begin_nested()
        with pytest.raises(OperationalError, match="lock timeout"):
            in_an_hour(show).enqueue(second, 1, "second")
        savepoint.rollback()
        session.commit()

        assert not in_an_hour(show).enqueue(second, 1, "third").is_new
        second.commit()


def test_an_enqueue_without_unique_options_asks_for_no_conflict(
    engine: Engine,
) -> None:
    plain = PgQueue(engine, notify=False)

    @plain.task(name="tests.plain")
    def plain_task(n: int) -> None: ...

    sent: list[str] = []
    with Session(engine) as session, session.begin():
        plain_task.enqueue(session, 1)  # the first one asks whether there is Citus
        event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
        plain_task.enqueue(session, 2)

    [statement] = [each for each in sent if "pgqueue" in each]
    assert "ON CONFLICT" not in statement


@pytest.mark.parametrize(
    ("on_conflict", "until", "many"),
    [
        ("return", "finished", True),
        ("raise", "finished", False),
        ("replace", "started", True),
        ("postpone", "started", False),
    ],
)
def test_of_eight_clients_that_enqueue_one_key_all_get_one_job(
    session: Session, database_url: str, on_conflict: str, until: str, many: bool
) -> None:
    seen = key_contest.compete(database_url, until, on_conflict, many)

    jobs = session.query(Job).all()
    assert len(jobs) == (2 if many else 1)
    assert session.query(MessageQueue).count() == len(jobs)
    allowed: set[Any] = {job.id for job in jobs}
    if on_conflict == "raise":
        allowed.add("duplicate")
    assert {each for one in seen for each in one} == allowed


@queue.task(name="tests.daily", unique=Unique(by=("page",), period=DAY))
def daily(page: int, fails: bool = False) -> int:
    if fails:
        raise ValueError
    return page


@queue.task(name="tests.empty", unique=Unique(by=(), period=DAY))
def empty(session: Session) -> None: ...


@queue.task(name="tests.gone", unique=Unique(by=(), period=DAY), keep=timedelta(0))
def gone() -> None: ...


@pytest.mark.parametrize("task", [daily, empty, gone])
def test_the_key_of_a_period_stays_taken_after_success(session: Session, task: Any) -> None:
    given = (1,) if task is daily else ()
    first = task.delay(*given)
    assert Worker(queue).run_until_empty(timeout=60)["succeeded"] == 1

    again = task.enqueue(session, *given)
    assert (again.id, again.is_new, again.outcome) == (first.id, False, "succeeded")
    assert task.enqueue_many(session, [given]) == [first.id]
    for on_conflict in ("raise", "replace", "postpone"):
        other = Unique(by=task.settings.unique.by, period=DAY, on_conflict=on_conflict)
        with pytest.raises(
            DuplicateJob, match=r"until its period is over.* with delay= or run_at="
        ):
            task.options(unique=other).enqueue(session, *given)
    assert task.options(delay=DAY).enqueue(session, *given).is_new
    assert session.execute(text("SELECT * FROM pgqueue.invariant_violations")).all() == []


def test_a_delay_of_zero_takes_the_key_of_the_period_of_now(session: Session) -> None:
    task = daily.options(unique=Unique(by=(), period=36_500 * DAY))

    first = task.options(delay=timedelta(0)).enqueue(session, 1)

    assert task.enqueue(session, 2).id == first.id


def test_a_job_that_has_failed_or_was_cancelled_gives_the_key_of_its_period_back(
    session: Session,
) -> None:
    failed = daily.options(max_attempts=1).delay(1, fails=True)
    cancelled = daily.options(delay=timedelta(minutes=1)).delay(2)
    assert queue.cancel(session, cancelled.id)
    session.commit()
    assert Worker(queue).run_until_empty(timeout=60)["failed"] == 1

    assert daily.enqueue(session, 1).id != failed.id
    assert daily.options(delay=timedelta(minutes=1)).enqueue(session, 2).is_new


def test_a_requeue_against_a_success_of_the_period_says_when_the_key_is_free(
    session: Session,
) -> None:
    task = daily.options(unique=Unique(by=("page",), period=36_500 * DAY), max_attempts=1)
    failed = task.delay(1, fails=True)
    Worker(queue).run_until_empty(timeout=60)
    task.delay(1)
    Worker(queue).run_until_empty(timeout=60)

    with pytest.raises(DuplicateJob, match=r"wait until that job .* or its period is over"):
        queue.requeue(session, failed.id)


def test_a_period_is_refused_where_it_could_not_hold(session: Session) -> None:
    with pytest.raises(OptionError, match="cannot ask the database for the period"):
        daily.job(1)
    with pytest.raises(OptionError, match="begins as the keys of"):
        show.options(unique=Unique(key="pgqueue.period:1:x", until="started")).delay(1)


@queue.task(name="tests.export", unique=Unique(by=("page",), across="queues"))
def export(page: int, text: str = "") -> None: ...


def test_a_key_across_queues_is_held_by_one_job_of_all_queues(session: Session) -> None:
    slow = export.options(queue="slow")
    first = slow.enqueue(session, 1)
    session.commit()

    assert export.enqueue(session, 1).id == first.id
    assert export.delay(1).id == first.id
    many = export.enqueue_many(session, [(1,), (2,), (2,)])
    assert (many[0], many[1]) == (first.id, many[2])
    with pytest.raises(DuplicateJob, match=f"job {first.id} holds the unique key") as raised:
        export.options(on_duplicate="raise").enqueue(session, 1)
    assert raised.value.holder == first.id
    session.add(export.job(1))
    with pytest.raises(DuplicateJob):
        session.flush()
    session.rollback()

    assert queue.cancel(session, first.id)
    assert export.enqueue(session, 1).is_new
    with pytest.raises(DuplicateJob, match=f"job {first.id}: job .* holds") as raised:
        queue.requeue(session, first.id)
    assert "of its queue" not in str(raised.value)
    assert raised.value.holder is not None


def test_a_key_across_queues_is_another_than_that_of_a_queue(session: Session) -> None:
    across = export.options(unique=Unique(key="k", across="queues")).enqueue(session, 1)
    of_queue = export.options(unique=Unique(key="k")).enqueue(session, 1)

    assert of_queue.is_new
    assert across.unique_key == f"pgqueue.across:{of_queue.unique_key}"
    with pytest.raises(OptionError, match=r"begins as the keys of Unique\(across=...\) do"):
        export.options(unique=Unique(key=across.unique_key)).enqueue(session, 1)


def test_a_changed_argument_takes_its_key_across_queues(session: Session) -> None:
    held = export.options(queue="slow").enqueue(session, 2)
    job = export.enqueue(session, 1)

    with pytest.raises(DuplicateJob, match=f"job {held.id} holds"):
        queue.change(session, job.id, args={"page": 2})
    queue.change(session, job.id, args={"page": 3})
    assert export.options(queue="slow").enqueue(session, 3).id == job.id


@pytest.mark.parametrize("many", [True, False])
def test_of_eight_clients_that_enqueue_one_key_across_two_queues_all_get_one_job(
    session: Session, database_url: str, many: bool
) -> None:
    seen = key_contest.compete(database_url, "finished", "return", many, across=True)

    jobs = session.query(Job).all()
    assert len(jobs) == (2 if many else 1)
    assert {each for one in seen for each in one} == {job.id for job in jobs}


def test_a_handler_is_not_given_its_own_job_in_another_queue(session: Session) -> None:
    @queue.task(name="tests.again", unique=Unique(by=(), across="queues"), max_attempts=1)
    def again(session: Session) -> None:
        again.options(queue="slow").enqueue(session)

    job = again.delay()
    Worker(queue).run_until_empty(timeout=60)

    error = session.get_one(Job, job.id).last_error
    assert error is not None
    assert "which is running this code, holds the unique key" in error


@queue.task(
    name="tests.import",
    max_attempts=1,
    unique=Unique(by=("page",), until="succeeded"),
)
def load(page: int, fails: bool = True) -> None:
    if fails:
        raise ValueError


def test_with_until_succeeded_a_failed_job_keeps_its_key_until_it_has_succeeded(
    session: Session,
) -> None:
    failed = load.delay(1)
    Worker(queue).run_until_empty(timeout=60)

    again = load.enqueue(session, 1)
    assert (again.id, again.is_new, again.outcome) == (failed.id, False, "failed")
    assert load.enqueue_many(session, [(1,), (2,)])[0] == failed.id
    words = "has succeeded, or was deleted after it had failed"
    for on_conflict in ("raise", "replace", "postpone"):
        unique = Unique(by=("page",), until="succeeded", on_conflict=on_conflict)
        with pytest.raises(DuplicateJob, match=f"job {failed.id} of queue .* {words}"):
            load.options(unique=unique).enqueue(session, 1)
    assert session.execute(text("SELECT * FROM pgqueue.invariant_violations")).all() == []

    assert queue.requeue(session, failed.id, args={"fails": False})
    session.commit()
    assert Worker(queue).run_until_empty(timeout=60)["succeeded"] == 1
    assert load.enqueue(session, 1).is_new


def test_a_failed_job_that_is_deleted_or_cancelled_gives_its_key_back(session: Session) -> None:
    deleted, cancelled = load.delay(1), load.delay(2)
    Worker(queue).run_until_empty(timeout=60)

    queue.delete(session, deleted.id)
    queue.requeue(session, cancelled.id)
    queue.cancel(session, cancelled.id)

    assert load.enqueue(session, 1).is_new
    assert load.enqueue(session, 2).is_new


def test_a_job_whose_worker_dies_in_its_last_attempt_keeps_its_key(
    session: Session, engine: Engine
) -> None:
    job = load.delay(1)
    let_start(session, job)
    with engine.begin() as connection:
        connection.execute(text("UPDATE pgqueue.workers SET dead_at = clock_timestamp()"))
        assert [rescued.job_id for rescued in Rescues(connection).rescue()] == [job.id]

    job = session.get_one(Job, job.id)
    assert (job.outcome, job.held_unique_key) == ("failed", job.unique_key)


def test_a_failed_successor_that_holds_its_key_comes_back_with_a_requeue(
    session: Session,
) -> None:
    with queue.workflow(session) as flow:
        first = flow.add(load.job(1))
        second = flow.add(load.job(2), after=first, when="ended")
    session.commit()
    assert Worker(queue).run_until_empty(timeout=60) == {"failed": 2}
    which = JobFilter(frozenset({JobStatus.FAILED}))
    assert Listing(session).taken_keys(which, limit=9) == 0

    assert queue.requeue(session, first.id)
    session.commit()

    session.refresh(second)
    assert (second.status, second.held_unique_key) == (JobStatus.BLOCKED, second.unique_key)


@pytest.mark.parametrize("many", [True, False])
def test_of_eight_clients_that_enqueue_the_key_of_a_failed_job_none_makes_one(
    session: Session, database_url: str, many: bool
) -> None:
    assert key_contest.compete(database_url, "succeeded", "return", many)
    failed = {job.id for job in session.query(Job)}
    for job_id in failed:
        key_contest.queue.run_now(session, job_id)
    session.commit()
    Worker(key_contest.queue).run_until_empty(timeout=60)

    seen = key_contest.compete(database_url, "succeeded", "return", many)

    assert {each for one in seen for each in one} == failed


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "by number": ({"by": 7}, "by is 7; give the name"),
    "by numbers": ({"by": (1,)}, "give the name of a parameter"),
    "by and key": ({"by": ("n",), "key": "k"}, "both by and key"),
    "key number": ({"key": 7}, "key is 7; give a string"),
    "until": ({"until": "ended"}, "'ended'; give one of 'started', 'finished', 'succeeded'"),
    "period and success": ({"period": HOUR, "until": "succeeded"}, "give one of them"),
    "across and success": (
        {"across": "queues", "until": "succeeded"},
        "across='queues' and until='succeeded' are given",
    ),
    "on_conflict": ({"on_conflict": "skip"}, "on_conflict is 'skip'; give one of 'return'"),
    "period 0": ({"period": timedelta(0)}, "period is .* from a second"),
    "period number": ({"period": 60}, "period is 60; give a timedelta"),
    "period and start": ({"period": HOUR, "until": "started"}, "give one of them"),
    "across": ({"across": "tasks"}, "across is 'tasks'; give one of 'queues'"),
    "across and period": (
        {"across": "queues", "period": HOUR},
        "across='queues' and a period are given",
    ),
    "across and replace": (
        {"across": "queues", "on_conflict": "replace"},
        "across='queues' and on_conflict='replace' are given",
    ),
    "at_most alone": ({"at_most": HOUR}, "moves none; omit at_most"),
    "at_most 0": ({"on_conflict": "postpone", "at_most": 0 * HOUR}, "at_most .* above zero"),
    "at_most number": ({"on_conflict": "postpone", "at_most": 5}, "at_most is 5"),
}


def test_what_makes_no_sense_is_refused() -> None:
    for given, words in REFUSED.values():
        with pytest.raises(OptionError, match=words):
            Unique(**given)


@pytest.mark.parametrize("of_task", ["raise", "replace", "postpone"])
def test_on_duplicate_of_one_enqueue_takes_the_place_of_on_conflict(of_task: Any) -> None:
    at_most = None if of_task == "raise" else HOUR
    unique = Unique(by=(), until="started", on_conflict=of_task, at_most=at_most)
    task = queue.task(name=f"tests.{of_task}", unique=unique)(lambda page: None)
    first = task.delay(1)

    assert task.options(on_duplicate="return").delay(2).id == first.id
    with pytest.raises(DuplicateJob):
        task.options(on_duplicate="raise").delay(2)
    with queue.session() as session:
        assert session.get_one(Job, first.id).args == {"page": 1}
