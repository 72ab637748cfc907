"""Jobs that wait for signals."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select, text
from sqlalchemy.orm import Session
from worker_rig import endings, running

from chaos.interleavings.logical_workers import execute
from chaos.workers import wait_until
from pgqueue import (
    ArgumentsError,
    JobContext,
    Limit,
    PayloadError,
    PgQueue,
    Retry,
    SignalTimeout,
    Snooze,
    Worker,
)
from pgqueue.repository.signals import PORTION
from pgqueue.tables import Job, JobStep, Signal
from pgqueue.testing import run_jobs
from pgqueue.worker.looks import Looker


class Rig:
    """A queue whose task waits for the signal ``paid`` of its order, and what it has received."""

    def __init__(self, engine: Engine) -> None:
        self.queue = PgQueue(engine)
        self.received: list[Any] = []
        self.task = self.queue.task(name="ship")(self.ship)

    def ship(self, ctx: JobContext, order: int) -> None:
        self.received.append(ctx.wait_for("paid", order, timeout=timedelta(days=7)))

    def send(self, key: int, payload: Any = None) -> int:
        with self.queue.session() as session, session.begin():
            return self.queue.signal(session, "paid", key, payload)

    def work(self) -> dict[str, int]:
        return endings(Worker(self.queue, concurrency=1))

    def undelivered(self) -> int:
        with self.queue.session() as session:
            return session.query(Signal).where(~Signal.delivered).count()


@pytest.fixture
def rig(engine: Engine) -> Rig:
    return Rig(engine)


def test_a_signal_wakes_the_jobs_that_sleep_for_it_and_no_other(rig: Rig) -> None:
    for order in (1, 1, 2):
        rig.task.delay(order)
    assert rig.work() == {"snoozed": 3}

    rig.send(1, {"by": "ann"})

    assert rig.work() == {"succeeded": 2}
    assert rig.received == [{"by": "ann"}] * 2  # it is not used up
    assert rig.undelivered() == 0
    assert rig.work() == {}


def test_a_signal_that_came_first_is_received_at_once(rig: Rig) -> None:
    rig.send(1, "too early")
    rig.task.delay(1)
    rig.send(1, "first")
    rig.send(1, "second")

    assert rig.work() == {"succeeded": 1}
    assert rig.received == ["first"]


def test_each_wait_of_a_job_receives_another_signal(rig: Rig) -> None:
    def total(ctx: JobContext) -> None:
        for number in range(2):
            rig.received.append(ctx.wait_for("paid", 1, name=f"payment {number}"))

    rig.queue.task(name="total")(total).delay()
    rig.send(1, 10)
    assert rig.work() == {"snoozed": 1}
    rig.send(1, 20)

    assert rig.work() == {"succeeded": 1}
    assert rig.received == [10, 10, 20]


def test_a_wait_ends_by_its_timeout_in_each_later_attempt_too(rig: Rig) -> None:
    timeouts: list[int] = []

    def ship(ctx: JobContext) -> None:
        for _ in range(2):
            try:
                ctx.wait_for("paid", 1, timeout=timedelta(days=1))
            except SignalTimeout:
                timeouts.append(ctx.attempt)
        if ctx.attempt == 1:
            rig.send(1)
            raise ValueError("planned")

    at_once = Retry.constant(timedelta(0))
    rig.queue.task(name="in_time", max_attempts=2, retry=at_once)(ship).delay()

    ends = Worker(rig.queue, concurrency=1).run_until_empty(ahead=timedelta(days=2))
    assert ends == {"snoozed": 1, "retried": 1, "succeeded": 1}
    assert timeouts == [1, 1, 2, 2]
    with rig.queue.session() as session:
        assert session.scalars(select(JobStep.result)).all() == [{}]


@pytest.mark.parametrize(
    ("key", "words"), [("7", "comes twice"), ("7" * 190, "the name of a step")]
)
def test_a_wait_whose_default_name_does_not_do_is_given_another(
    rig: Rig, key: str, words: str
) -> None:
    def total(ctx: JobContext) -> None:
        for _ in range(2):
            ctx.wait_for("paid", key)

    job_id = rig.queue.task(name="total", retry=Retry.never())(total).delay().id
    rig.send(int(key))

    assert rig.work() == {"failed": 1}
    with rig.queue.session() as session:
        error = session.get_one(Job, job_id).last_error or ""
    assert words in error
    assert "by name=" in error


def test_an_async_handler_waits(rig: Rig) -> None:
    async def ship(ctx: JobContext) -> None:
        rig.received.append(await ctx.wait_for_async("paid", 1))
        await asyncio.sleep(0)

    rig.queue.task(name="ship_async")(ship).delay()
    assert rig.work() == {"snoozed": 1}
    rig.send(1, [1])

    assert rig.work() == {"succeeded": 1}
    assert rig.received == [[1]]


def test_waits_in_the_transaction_of_a_test(rig: Rig) -> None:
    with rig.queue.session() as session:
        rig.task.enqueue(session, 1)
        run_jobs(session, queue=rig.queue)
        rig.queue.signal(session, "paid", 1, "now")
        run_jobs(session, queue=rig.queue)
        session.rollback()

    assert rig.received == ["now"]


@contextmanager
def before_the_wait(act: Callable[[], object]) -> Iterator[None]:
    """Do something right before a wait is recorded."""
    acts = [act]

    def listen(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if acts and "INSERT INTO pgqueue.job_steps" in statement:
            acts.pop()()

    event.listen(Engine, "before_cursor_execute", listen)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", listen)
    assert not acts


@pytest.fixture
def session(rig: Rig) -> Iterator[Session]:
    with rig.queue.session() as session:
        yield session


def test_a_signal_in_an_open_transaction_is_found_after_its_commit(
    rig: Rig, session: Session
) -> None:
    rig.task.delay(1)
    rig.queue.signal(session, "paid", 1, "late")

    assert rig.work() == {"snoozed": 1}
    session.commit()

    assert rig.work() == {"succeeded": 1}


def test_a_signal_that_is_delivered_before_the_wait_is_committed_is_received(
    rig: Rig, session: Session
) -> None:
    """Nothing sleeps for it then: the wait looks after its own commit."""
    rig.task.delay(1)
    rig.queue.signal(session, "paid", 1, "meanwhile")

    def deliver() -> None:
        session.commit()
        _deliver(rig)
        assert rig.undelivered() == 0

    with before_the_wait(deliver):
        assert rig.work() == {"succeeded": 1}


def test_a_signal_stays_undelivered_while_its_job_is_about_to_sleep(rig: Rig) -> None:
    """The worker that delivers sees the wait and a lease: the job has looked before."""
    asleep = False

    def ship(ctx: JobContext) -> None:
        nonlocal asleep
        try:
            rig.received.append(ctx.wait_for("paid", 1))
        except BaseException:
            if not asleep:
                asleep = True
                rig.send(1, "now")
                _deliver(rig)
                assert rig.undelivered() == 1
            raise

    rig.queue.task(name="about_to_sleep")(ship).delay()

    assert rig.work() == {"snoozed": 1, "succeeded": 1}
    assert (rig.received, rig.undelivered()) == (["now"], 0)


def _deliver(rig: Rig) -> int:
    with rig.queue.engine.connect() as connection:
        return Looker(notify=False).deliver(connection)


def test_a_signal_wakes_a_job_once_that_does_not_wait_any_more(rig: Rig) -> None:
    waits = True

    def ship(ctx: JobContext) -> Snooze | None:
        if waits:
            ctx.wait_for("paid", 1)
        return Snooze(timedelta(hours=1))

    rig.queue.task(name="moved_on")(ship).delay()
    assert rig.work() == {"snoozed": 1}
    waits = False
    rig.send(1)

    assert rig.work() == {"snoozed": 1}
    assert (rig.undelivered(), rig.work()) == (0, {})


def _sleep_for(rig: Rig, *orders: int) -> list[int]:
    """Jobs that sleep for the signals of these orders, without an attempt."""
    with rig.queue.session() as session, session.begin():
        later = rig.task.options(delay=timedelta(days=1))
        sleeping = list(later.enqueue_many(session, [(order,) for order in orders]))
        session.execute(
            text(
                "INSERT INTO pgqueue.job_steps"
                " (job_id, name, kind, attempt, started_at, signal, key)"
                " SELECT id, 'wait', 'wait', 1, now(), 'paid', args->>'order' FROM pgqueue.jobs"
            )
        )
        return sleeping


def _due(rig: Rig) -> set[int]:
    with rig.queue.session() as session:
        return set(session.scalars(select(Job.id).where(Job.run_at <= func.now())))


def test_many_jobs_that_sleep_for_a_signal_are_woken_by_few_statements(rig: Rig) -> None:
    _sleep_for(rig, *[1] * (2 * PORTION), 2)
    rig.send(1)
    statements: list[str] = []

    def listen(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", listen)
    try:
        assert _deliver(rig) == 2 * PORTION
    finally:
        event.remove(Engine, "before_cursor_execute", listen)

    assert len(statements) < 20
    assert (len(_due(rig)), rig.undelivered()) == (2 * PORTION, 0)


def test_a_job_whose_wake_the_database_refuses_keeps_only_its_own_signal(
    rig: Rig, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    refused, *others = _sleep_for(rig, 1, 1, 2)
    execute(
        engine,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'not today'; END $$;"
        " CREATE TRIGGER refuse BEFORE UPDATE ON pgqueue.jobs"
        f" FOR EACH ROW WHEN (OLD.id = {refused}) EXECUTE FUNCTION refuse()",
    )
    rig.send(1)
    rig.send(2)
    looker = Looker(notify=False)

    with engine.connect() as connection:
        assert [looker.deliver(connection) for _ in range(2)] == [2, 0]
    assert _due(rig) == {*others}
    assert rig.undelivered() == 1
    assert caplog.text.count(f"job {refused} cannot be woken by its signal") == 1

    execute(engine, "DROP TRIGGER refuse ON pgqueue.jobs")
    assert _deliver(rig) == 1
    assert rig.undelivered() == 0


def test_a_job_that_a_transaction_has_locked_is_woken_later(rig: Rig, session: Session) -> None:
    locked, other = _sleep_for(rig, 1, 1)
    rig.send(1)
    session.get_one(Job, locked, with_for_update=True)

    assert _deliver(rig) == 1
    assert (_due(rig), rig.undelivered()) == ({other}, 1)

    session.rollback()
    assert _deliver(rig) == 1
    assert (_due(rig), rig.undelivered()) == ({locked, other}, 0)


def test_a_job_under_a_limit_is_woken(rig: Rig) -> None:
    one_at_a_time = rig.queue.task(name="one_at_a_time", limit=Limit(1))(rig.ship)
    one_at_a_time.delay(1)
    one_at_a_time.delay(2)
    assert rig.work() == {"snoozed": 2}  # a job that sleeps holds no place

    rig.send(2, "now")

    assert rig.work() == {"succeeded": 1}
    assert (rig.received, rig.undelivered()) == (["now"], 0)


@pytest.mark.parametrize("notifies", [True, False])
def test_a_worker_that_sleeps_is_woken_by_a_signal(rig: Rig, notifies: bool) -> None:
    """Without notifications, by the upkeep of the worker."""
    rig.queue.notify = notifies
    worker = Worker(rig.queue, concurrency=1, poll_interval=timedelta(seconds=60))
    job_id = rig.task.delay(1).id
    with running(worker):
        wait_until(lambda: _status(rig, job_id, snoozes=1), seconds=60)
        rig.send(1, "now")
        wait_until(lambda: rig.received, seconds=30)

    assert rig.received == ["now"]


def _status(rig: Rig, job_id: int, *, snoozes: int) -> bool:
    with rig.queue.session() as session:
        return session.get_one(Job, job_id).snoozes == snoozes


@pytest.mark.parametrize(
    ("name", "key", "payload", "error"),
    [
        ("two words", 1, None, ArgumentsError),
        ("paid", 1.5, None, ArgumentsError),
        ("paid", True, None, ArgumentsError),
        ("paid", "x" * 201, None, ArgumentsError),
        ("paid", 1, object(), PayloadError),
    ],
)
def test_a_signal_that_cannot_be_is_refused(
    rig: Rig, session: Session, name: str, key: Any, payload: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        rig.queue.signal(session, name, key, payload)
