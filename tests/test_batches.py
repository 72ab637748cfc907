"""Batches: what belongs to one, when it ends, and what its callback is."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from threading import Event
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, make_url, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from pgqueue import (
    ArgumentsError,
    BatchEnded,
    BatchNotFound,
    Cancel,
    Change,
    Job,
    JobContext,
    Keep,
    Limit,
    NoTransaction,
    OptionError,
    PgQueue,
    PgQueueError,
    TaskDefinitionError,
    Worker,
)
from pgqueue.repository.batches import Batches
from pgqueue.tables import Batch, BatchJob, Blocked
from pgqueue.testing import run_jobs
from pgqueue.worker.duties.batches import CountBatches
from pgqueue.worker.duties.prune import PruneRound, RoundState

AT_ONCE = timedelta(0)


class Shop:
    """An application that writes down which callbacks have run."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.queue = queue = PgQueue(engine, **options)
        self.told: list[tuple[str, int]] = []
        self.mail = queue.task(name="mail")(lambda n: n)
        self.fail = queue.task(name="fail", max_attempts=1)(self._fail)
        self.unwanted = queue.task(name="unwanted")(self._cancel)
        self.brief = queue.task(name="brief", keep=AT_ONCE)(lambda: None)
        self.once = queue.task(name="once", unique_key=lambda n: f"once {n}")(lambda n: n)
        self.done = queue.task(name="done")(self._done)
        self.broken = queue.task(name="broken")(self._broken)

    def _fail(self) -> None:
        raise ValueError("planned")

    def _cancel(self) -> None:
        raise Cancel

    def _done(self, batch_id: int) -> None:
        self.told.append(("done", batch_id))

    def _broken(self, batch_id: int) -> None:
        self.told.append(("broken", batch_id))

    def work(self) -> dict[str, int]:
        return Worker(self.queue).run_until_empty(timeout=60)

    def callbacks(self) -> dict[str, Any]:
        return {"on_success": self.done, "on_failure": self.broken}


@pytest.fixture
def shop(engine: Engine) -> Shop:
    return Shop(engine)


def test_the_callback_is_enqueued_once_when_the_last_job_has_ended(
    shop: Shop, session: Session
) -> None:
    with shop.queue.batch(session, "issue 12", meta={"issue": 12}, **shop.callbacks()) as batch:
        shop.mail.enqueue_many(session, [(n,) for n in range(5)])
        shop.mail.enqueue(session, 5)
        session.add(shop.mail.job(6))
    shop.mail.enqueue(session, 7)  # after the block: in no batch
    session.commit()

    assert shop.work() == {"succeeded": 9}
    assert shop.work() == {}

    assert shop.told == [("done", batch.id)]
    state = shop.queue.get_batch(session, batch.id)
    assert (state.name, state.meta, state.outcome) == ("issue 12", {"issue": 12}, "succeeded")
    assert (state.total, state.ended, state.failed, state.cancelled) == (7, 7, 0, 0)
    assert state.ended_at is not None
    assert session.get_one(Job, state.callback_id).task == "done"


def test_the_progress_is_that_of_its_own_jobs(shop: Shop, session: Session) -> None:
    with shop.queue.batch(session) as batch:
        later = shop.mail.options(delay=timedelta(hours=1)).enqueue(session, 1)
        shop.fail.enqueue(session)
        shop.unwanted.enqueue(session)
        shop.mail.enqueue(session, 2)
    with shop.queue.batch(session, "other"):
        shop.mail.enqueue(session, 3)
    session.commit()
    shop.work()

    other, state = shop.queue.batches(session)

    assert (state.id, state.outcome, state.ended_at) == (batch.id, None, None)
    assert (state.total, state.ended, state.failed, state.cancelled) == (4, 3, 1, 1)
    assert (other.name, other.outcome, other.total) == ("other", "succeeded", 1)
    assert shop.queue.batches(session, 1) == [other]
    assert watched(session, batch.id) == later.id


def watched(session: Session, batch_id: int) -> int:
    """The job that an open batch watches."""
    return session.scalars(select(Blocked.waits_for).where(Blocked.node_id == -batch_id)).one()


def test_a_callback_is_a_blocked_job_until_its_batch_ends(shop: Shop, session: Session) -> None:
    with shop.queue.batch(session, on_success=shop.done, on_failure=shop.broken) as batch:
        shop.mail.enqueue(session, 1)
    session.commit()

    blocked = session.scalars(select(Job).where(Job.status == "blocked").order_by(Job.id)).all()

    assert [job.task for job in blocked] == ["done", "broken"]
    assert {job.status for job in blocked} == {"blocked"}
    assert shop.queue.check(session) == []
    shop.work()
    session.expire_all()
    assert session.scalars(select(Job.task).order_by(Job.id)).all() == ["mail", "done"]
    assert shop.queue.get_batch(session, batch.id).callback_id == blocked[0].id


@pytest.mark.parametrize("how", ["cancel", "cancel_where", "delete"])
def test_a_callback_that_is_cancelled_or_deleted_never_runs(
    shop: Shop, session: Session, how: str
) -> None:
    with shop.queue.batch(session, on_success=shop.done) as batch:
        shop.mail.enqueue(session, 1)
    session.commit()
    callback = session.scalars(select(Job).where(Job.status == "blocked")).one()

    if how == "cancel":
        shop.queue.cancel(session, callback.id)
    elif how == "cancel_where":
        assert shop.queue.cancel_where(session, task="done") == {Change.CANCELLED: 1}
    else:
        session.delete(callback)
    session.commit()

    assert shop.queue.check(session) == []
    assert shop.work() == {"succeeded": 1}
    state = shop.queue.get_batch(session, batch.id)
    assert (state.outcome, state.callback_id) == ("succeeded", None)
    assert shop.queue.check(session) == []


def test_a_batch_fails_if_a_job_of_it_has_failed_and_says_so_at_its_end(
    shop: Shop, session: Session
) -> None:
    with shop.queue.batch(session, **shop.callbacks()) as batch:
        shop.fail.enqueue(session)
        later = shop.mail.options(delay=timedelta(hours=1)).enqueue(session, 1)
    session.commit()
    shop.work()
    assert shop.told == []

    shop.queue.run_now(session, later.id)
    session.commit()
    shop.work()

    assert shop.told == [("broken", batch.id)]
    assert shop.queue.get_batch(session, batch.id).outcome == "failed"


@pytest.mark.parametrize("has_own", [True, False], ids=["on_cancelled", "else on_failure"])
def test_a_batch_with_cancelled_jobs_says_so(shop: Shop, session: Session, has_own: bool) -> None:
    callbacks = shop.callbacks()
    if has_own:
        callbacks |= {"on_cancelled": shop.done, "on_success": shop.broken}
    with shop.queue.batch(session, **callbacks) as batch:
        shop.mail.enqueue(session, 0)
        shop.queue.cancel(session, shop.mail.enqueue(session, 1).id)
        shop.unwanted.enqueue(session)
    session.commit()
    shop.work()

    assert shop.told == [("done" if has_own else "broken", batch.id)]
    state = shop.queue.get_batch(session, batch.id)
    assert (state.outcome, state.total, state.cancelled) == ("cancelled", 3, 2)
    assert shop.queue.progress_of(session, batch.id) == state
    assert shop.queue.check(session) == []


def test_a_batch_with_a_failed_job_has_failed_also_if_others_were_cancelled(
    shop: Shop, session: Session
) -> None:
    with shop.queue.batch(session, on_cancelled=shop.done, on_failure=shop.broken) as batch:
        shop.fail.enqueue(session)
        shop.unwanted.enqueue(session)
    session.commit()
    shop.work()

    assert shop.told == [("broken", batch.id)]


def test_the_progress_is_read_from_the_row_of_the_batch(
    shop: Shop, engine: Engine, session: Session
) -> None:
    """It is that of the last count.  Before the first one, the jobs are counted."""
    with shop.queue.batch(session) as batch:
        first = shop.mail.enqueue(session, 1).id
        shop.mail.options(delay=timedelta(hours=1)).enqueue(session, 2)
    session.commit()
    progress = partial(shop.queue.progress_of, session, batch.id)
    assert (progress().total, progress().ended) == (2, 0)

    with engine.connect() as connection:
        count(connection, batch.id)
        shop.queue.cancel(session, first)
        session.commit()
        assert progress().ended == 0
        count(connection, batch.id)

    assert (progress().total, progress().ended, progress().cancelled) == (2, 1, 1)
    assert shop.queue.get_batch(session, batch.id) == progress()


def count(connection: Connection, batch_id: int) -> None:
    """Let a worker count this batch now, whose last count was long ago."""
    with connection.begin():
        long_ago = text("UPDATE pgqueue.batches SET count_at = '2001-01-01Z' WHERE id = :id")
        connection.execute(long_ago, {"id": batch_id})
    CountBatches(stopping=Event()).step(connection)


def test_a_failed_job_that_is_requeued_before_the_end_counts_as_it_ends_then(
    shop: Shop, engine: Engine, session: Session
) -> None:
    with shop.queue.batch(session, **shop.callbacks(), on_cancelled=shop.done) as batch:
        job_id = shop.fail.enqueue(session).id
        later = shop.mail.options(delay=timedelta(hours=1)).enqueue(session, 1)
    session.commit()
    shop.work()
    assert watched(session, batch.id) == later.id

    assert shop.queue.requeue(session, job_id) == Change.REQUEUED
    shop.queue.cancel(session, later.id)
    session.commit()
    with engine.begin() as connection:  # before the requeued job runs
        assert Batches(connection).look(batch.id).watches == [job_id]
    shop.queue.cancel(session, job_id)
    session.commit()
    shop.work()

    assert [word for word, _ in shop.told] == ["done"]


def test_a_job_that_is_requeued_after_the_end_changes_nothing(shop: Shop, session: Session) -> None:
    with shop.queue.batch(session, **shop.callbacks()) as batch:
        job_id = shop.fail.enqueue(session).id
    session.commit()
    shop.work()
    ended = shop.queue.get_batch(session, batch.id)

    shop.queue.requeue(session, job_id)
    session.commit()
    shop.work()

    assert shop.told == [("broken", batch.id)]
    assert shop.queue.get_batch(session, batch.id) == ended


def test_a_batch_without_jobs_succeeds(shop: Shop, session: Session) -> None:
    with shop.queue.batch(session, **shop.callbacks()) as batch:
        pass
    session.commit()

    assert shop.work() == {"succeeded": 1}
    assert shop.told == [("done", batch.id)]
    assert shop.queue.get_batch(session, batch.id).total == 0


def test_jobs_that_are_deleted_when_they_succeed_have_ended(shop: Shop, session: Session) -> None:
    with shop.queue.batch(session, **shop.callbacks()) as batch:
        shop.brief.enqueue_many(session, [()] * 3)
    session.commit()
    shop.work()

    assert session.query(Job).where(Job.task == "brief").count() == 0
    assert shop.told == [("done", batch.id)]
    assert shop.queue.get_batch(session, batch.id).total == 3


def test_the_job_that_holds_a_unique_key_belongs_to_the_batch(shop: Shop, session: Session) -> None:
    first = shop.once.options(delay=timedelta(hours=1)).enqueue(session, 1)
    session.commit()
    with shop.queue.batch(session) as one:
        assert shop.once.enqueue(session, 1).id == first.id
    with shop.queue.batch(session) as many:
        job_ids = shop.once.enqueue_many(session, [(1,), (2,)])

    assert members(session, one.id) == {first.id}
    assert job_ids[0] == first.id
    assert members(session, many.id) == set(job_ids)


def members(session: Session, batch_id: int) -> set[int]:
    return set(session.scalars(select(BatchJob.job_id).where(BatchJob.batch_id == batch_id)))


def test_what_a_savepoint_undoes_does_not_belong_to_the_batch(shop: Shop, session: Session) -> None:
    with shop.queue.batch(session) as batch:
        kept = shop.mail.enqueue(session, 1)
        savepoint = session.begin_nested()
        shop.mail.enqueue(session, 2)
        savepoint.rollback()

    assert members(session, batch.id) == {kept.id}


def test_a_block_inside_of_another_collects_for_itself(shop: Shop, session: Session) -> None:
    with shop.queue.batch(session) as outer:
        first = shop.mail.enqueue(session, 1)
        with shop.queue.batch(session) as inner:
            second = shop.mail.enqueue(session, 2)
        third = shop.mail.enqueue(session, 3)

    assert members(session, outer.id) == {first.id, third.id}
    assert members(session, inner.id) == {second.id}


def test_a_block_that_fails_leaves_no_callback(shop: Shop, session: Session) -> None:
    def fail_in_block() -> None:
        with shop.queue.batch(session, **shop.callbacks()):
            shop.mail.enqueue(session, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_block()
    shop.mail.enqueue(session, 2)
    session.commit()

    assert shop.work() == {"succeeded": 2}
    assert shop.told == []
    assert session.query(BatchJob).count() == 0


def test_a_commit_inside_of_the_block_is_refused(shop: Shop, session: Session) -> None:
    def commit_in_block() -> None:
        with shop.queue.batch(session, **shop.callbacks()):
            shop.mail.enqueue(session, 1)
            session.commit()

    with pytest.raises(PgQueueError, match=r"run, but are not in batch \d+.* after the block"):
        commit_in_block()

    assert shop.work() == {"succeeded": 1}
    assert shop.told == []


def test_autocommit_is_refused(shop: Shop, engine: Engine) -> None:
    with (
        Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session,
        pytest.raises(NoTransaction),
        shop.queue.batch(session),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"name": ""}, OptionError),
        ({"name": "x" * 201}, OptionError),
        ({"meta": {"pgqueue.x": 1}}, OptionError),
        ({"on_success": len}, TaskDefinitionError),
    ],
)
def test_what_cannot_be_a_batch_is_refused(
    shop: Shop, session: Session, given: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        shop.queue.batch(session, **given)


def test_a_task_that_cannot_be_a_callback_is_refused(shop: Shop, session: Session) -> None:
    wrong: list[tuple[Any, type[Exception]]] = [
        (shop.fail, ArgumentsError),  # takes no argument
        (shop.once, OptionError),  # has a unique key
        (shop.done.options(delay=timedelta(hours=1)), OptionError),
    ]
    for task, error in wrong:
        with pytest.raises(error), shop.queue.batch(session, on_success=task):
            pass


def test_a_wrong_callback_is_told_with_its_batch_and_its_parameter(
    shop: Shop, session: Session
) -> None:
    with pytest.raises(TaskDefinitionError, match="batch issue: on_failure is 'mail'; give a task"):
        shop.queue.batch(session, "issue", on_failure="mail")  # type: ignore[arg-type]

    words = "batch issue: on_failure gets the id of the batch, an int, as its one argument: task"
    with (
        pytest.raises(ArgumentsError, match=words),
        shop.queue.batch(session, "issue", on_failure=shop.fail),
    ):
        pass


def test_a_batch_has_an_id_inside_of_its_block(shop: Shop, session: Session) -> None:
    batch = shop.queue.batch(session)
    with pytest.raises(PgQueueError, match="no id yet"):
        _ = batch.id
    with batch:
        assert batch.id > 0


def test_a_callback_keeps_its_options_the_meta_of_now_and_its_limits(
    engine: Engine, session: Session
) -> None:
    shop = Shop(engine, queue_limits={"calls": Limit(1)})
    trace = {"trace": "abc"}
    shop.queue.on_enqueue(lambda task: trace)
    callback = shop.done.options(queue="calls", priority=1, max_attempts=3, tags=["end"])
    with shop.queue.batch(session, on_success=callback):
        pass
    session.commit()
    trace.clear()

    Worker(shop.queue, ["default", "calls"]).run_until_empty(timeout=60)

    job = session.scalars(select(Job)).one()
    assert (job.queue, job.priority, job.max_attempts) == ("calls", 1, 3)
    assert (job.tags, job.meta, job.outcome) == (["end"], {"trace": "abc"}, "succeeded")
    assert job.limit_keys


def test_a_worker_that_does_not_know_the_callback_ends_the_batch(
    shop: Shop, engine: Engine, session: Session
) -> None:
    other = PgQueue(engine)
    other.task(name="mail")(lambda n: n)
    with shop.queue.batch(session, **shop.callbacks()):
        shop.mail.enqueue(session, 1)
    session.commit()

    assert Worker(other).run_until_empty(timeout=60) == {"succeeded": 1}
    assert shop.work() == {"succeeded": 1}
    assert len(shop.told) == 1


def test_a_job_adds_to_its_batch_in_the_transaction_that_ends_it(
    shop: Shop, session: Session
) -> None:
    def spread(session: Session, ctx: JobContext, batch_id: int, left: int) -> None:
        with shop.queue.extend_batch(session, batch_id):
            for _ in range(2 if left else 0):
                again.enqueue(session, batch_id, left - 1)

    again = shop.queue.task(name="spread")(spread)
    with shop.queue.batch(session, **shop.callbacks()) as batch:
        again.enqueue(session, batch.id, 3)
    session.commit()

    assert shop.work() == {"succeeded": 16}

    assert shop.told == [("done", batch.id)]
    assert shop.queue.get_batch(session, batch.id).total == 15


def test_an_ended_batch_and_an_unknown_one_refuse_additions(shop: Shop, session: Session) -> None:
    with shop.queue.batch(session) as batch:
        pass
    session.commit()
    shop.work()

    with pytest.raises(BatchEnded), shop.queue.extend_batch(session, batch.id):
        pass
    with pytest.raises(BatchNotFound), shop.queue.extend_batch(session, batch.id + 1):
        pass
    with pytest.raises(BatchNotFound):
        shop.queue.get_batch(session, batch.id + 1)
    with pytest.raises(ArgumentsError):
        shop.queue.get_batch(session, "1")  # type: ignore[arg-type]


def test_an_id_that_no_row_can_have_is_refused_before_the_database_sees_it(shop: Shop) -> None:
    with shop.queue.session() as session:
        mine = shop.mail.enqueue(session, 1).id

        for call in ("get_batch", "extend_batch", "cancel", "run_now"):
            for id in (2**63, -(2**63) - 1):
                with pytest.raises(ArgumentsError, match="too large"):
                    getattr(shop.queue, call)(session, id)

        session.commit()  # what was enqueued before is kept
        assert session.get(Job, mine) is not None


@pytest.mark.parametrize("limit", [-1, "10", 2**63, True])
def test_a_limit_of_a_list_that_is_no_number_is_refused(
    session: Session, shop: Shop, limit: Any
) -> None:
    with pytest.raises(OptionError, match="batches: limit is"):
        shop.queue.batches(session, limit)


def test_an_async_session_opens_batches(shop: Shop, database_url: str) -> None:
    async def run() -> int:
        url = make_url(database_url).set(drivername="postgresql+psycopg")
        engine = create_async_engine(url)
        async with AsyncSession(engine, expire_on_commit=False) as session:
            async with shop.queue.batch(session, "async", **shop.callbacks()) as batch:
                await shop.mail.enqueue_many_async(session, [(1,), (2,)])
                await shop.mail.enqueue_async(session, 3)
            async with shop.queue.extend_batch(session, batch.id):
                await shop.mail.enqueue_async(session, 4)
            await session.commit()
            state = await session.run_sync(shop.queue.get_batch, batch.id)
            assert (state.total, state.ended) == (4, 0)
        await engine.dispose()
        return batch.id

    batch_id = asyncio.run(run())
    shop.work()

    assert shop.told == [("done", batch_id)]


def test_callbacks_run_in_the_transaction_of_a_test(shop: Shop, session: Session) -> None:
    with shop.queue.batch(session, **shop.callbacks()) as batch:
        shop.mail.enqueue(session, 1)

    ran = run_jobs(session, queue=shop.queue)

    assert [job.task for job in ran] == ["mail", "done"]
    assert shop.queue.get_batch(session, batch.id).outcome == "succeeded"


def test_an_enqueue_outside_of_a_block_sends_what_it_sent_before(
    shop: Shop, session: Session
) -> None:
    sent: list[str] = []
    shop.mail.enqueue(session, 0)  # the first one asks whether there is Citus
    event.listen(
        session.connection(),
        "before_cursor_execute",
        lambda _c, _d, statement, *_: sent.append(statement),
    )
    shop.mail.enqueue(session, 1)
    shop.mail.enqueue_many(session, [(1,), (2,)])

    assert len(sent) == 2
    assert not [statement for statement in sent if "batch" in statement]


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


def pruned(shop: Shop, connection: Connection) -> None:
    prune_round = PruneRound(shop.queue.retention)
    while prune_round.step(connection) is RoundState.MORE:
        pass


def test_pruning_leaves_the_jobs_of_an_open_batch(engine: Engine, connection: Connection) -> None:
    shop = Shop(engine, keep=Keep(AT_ONCE, AT_ONCE, AT_ONCE))
    with shop.queue.session() as session, session.begin():
        with shop.queue.batch(session, **shop.callbacks()) as batch:
            shop.fail.enqueue(session)
            later = shop.mail.options(delay=timedelta(hours=1)).enqueue(session, 1).id
        shop.fail.enqueue(session)
    shop.work()

    pruned(shop, connection)

    with shop.queue.session() as session, session.begin():
        assert session.query(Job).where(Job.task == "fail").count() == 1
        shop.queue.cancel(session, later)
    shop.work()
    assert shop.told == [("broken", batch.id)]
    pruned(shop, connection)
    with shop.queue.session() as session:
        assert session.query(Job).count() == 0
        assert shop.queue.get_batch(session, batch.id).failed == 1


def test_an_ended_batch_is_deleted_when_its_time_is_over_and_its_callback_has_ended(
    engine: Engine, connection: Connection
) -> None:
    shop = Shop(engine, keep=timedelta(days=3))
    with shop.queue.session() as session, session.begin():
        for word in ("old", "young", "open", "called"):
            callback = shop.done.options(queue="nobody") if word == "called" else None
            with shop.queue.batch(session, word, on_success=callback):
                delay = timedelta(hours=word == "open")
                shop.mail.options(delay=delay).enqueue_many(session, [(1,), (2,)])
    shop.work()
    with engine.begin() as own:
        own.execute(
            text(
                "UPDATE pgqueue.batches SET ended_at = ended_at - CASE name"
                " WHEN 'young' THEN interval '2 days' ELSE interval '4 days' END"
            )
        )

    pruned(shop, connection)

    with shop.queue.session() as session:
        left = set(session.scalars(select(Batch.name)))
        assert left == {"young", "open", "called"}
        of_batches = session.scalars(select(BatchJob.batch_id).distinct()).all()
        assert len(of_batches) == 3


def old_batches(shop: Shop, *names: str) -> None:
    """Batches that ended long ago."""
    with shop.queue.session() as session, session.begin():
        for name in names:
            with shop.queue.batch(session, name):
                shop.mail.enqueue(session, 1)
    shop.work()
    with shop.queue.session() as session, session.begin():
        session.execute(text("UPDATE pgqueue.batches SET ended_at = ended_at - interval '1 year'"))


def names_left(shop: Shop) -> list[str | None]:
    with shop.queue.session() as session:
        return list(session.scalars(select(Batch.name).order_by(Batch.id)))


def test_a_batch_to_which_a_row_of_the_application_refers_stays_and_is_not_tried(
    engine: Engine, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(engine)
    old_batches(shop, "referred", "other")
    with engine.begin() as own:
        own.execute(text("CREATE TABLE sites (batch bigint REFERENCES pgqueue.batches)"))
        own.execute(text("INSERT INTO sites SELECT min(id) FROM pgqueue.batches"))

    pruned(shop, connection)

    assert names_left(shop) == ["referred"]
    assert "stays although its time is over" not in caplog.text


def test_a_batch_whose_deletion_a_trigger_refuses_stops_the_pruning_of_no_other(
    engine: Engine, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(engine)
    old_batches(shop, "refused", "other")
    with engine.begin() as own:
        own.exec_driver_sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'kept for the auditor'; END $$;"
            "CREATE TRIGGER refuse BEFORE DELETE ON pgqueue.batches FOR EACH ROW"
            " WHEN (OLD.id = 1) EXECUTE FUNCTION refuse()"
        )

    pruned(shop, connection)

    assert names_left(shop) == ["refused"]
    assert "batch 1 stays although its time is over: ProgrammingError" in caplog.text


def test_an_application_prunes_its_own_batches_only(engine: Engine, connection: Connection) -> None:
    shop, bank = Shop(engine, application="shop"), Shop(engine, application="bank", keep=None)
    old_batches(shop, "short")
    old_batches(bank, "for ever")

    pruned(shop, connection)

    assert names_left(shop) == ["for ever"]


def test_a_batch_that_does_not_exist_cannot_be_cancelled(session: Session) -> None:
    with pytest.raises(BatchNotFound, match="99"):
        PgQueue().cancel_batch(session, 99)
