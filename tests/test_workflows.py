"""Workflows: jobs that wait for each other."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, make_url, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from worker_rig import endings, running

from chaos.interleavings.logical_workers import execute, wait_until
from pgqueue import (
    BatchNotFound,
    Change,
    DuplicateJob,
    Job,
    JobContext,
    JobStatus,
    Limit,
    OptionError,
    PgQueue,
    PgQueueError,
    Selection,
    Unique,
    Worker,
)
from pgqueue.tables import WaitingMessage
from pgqueue.testing import run_jobs
from pgqueue.worker.duties.prune import PruneRound, RoundState
from pgqueue.workflows import OpenWorkflow


class Rig:
    """A queue whose tasks note that they have run."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.engine = engine
        self.queue = PgQueue(engine, **options)
        self.ran: list[str] = []
        self.failing: set[str] = set()
        self.note = self.queue.task(name="note", max_attempts=1)(self._note)
        self.tell = self.queue.task(name="tell")(self._tell)
        self.note_id = self.queue.task(name="done")(self._done)

    def _note(self, name: str) -> str:
        if name in self.failing:
            raise ValueError(name)
        self.ran.append(name)
        return name

    def append(self, name: str) -> None:
        self.ran.append(name)

    def _tell(self, workflow_id: int) -> None:
        self.ran.append("told")

    def until_cancelled(self, ctx: JobContext) -> None:
        wait_until(ctx.is_cancelled, what="the job is cancelled")

    def _done(self, workflow_id: int) -> None:
        self.ran.append("done")

    def outcome(self, flow: OpenWorkflow) -> str | None:
        with self.queue.session() as session:
            return self.queue.get_batch(session, flow.id).outcome

    def work(self) -> dict[str, int]:
        return endings(Worker(self.queue, concurrency=1))


@pytest.fixture
def rig(engine: Engine) -> Iterator[Rig]:
    rig = Rig(engine)
    yield rig
    with rig.queue.session() as session:
        assert rig.queue.check(session) == []


def statuses(session: Session) -> dict[str, str]:
    session.expire_all()
    jobs = session.scalars(select(Job).where(Job.task == "note"))
    return {job.args["name"]: job.status.value for job in jobs}


def test_a_job_starts_after_those_for_which_it_waits(rig: Rig, session: Session) -> None:
    with rig.queue.workflow(session, "import") as flow:
        last = flow.add(rig.note.job("first"))
        for name in ("second", "third"):
            last = flow.add(rig.note.job(name), after=last)
    assert last.status is JobStatus.BLOCKED
    session.commit()

    assert rig.work() == {"succeeded": 3}

    assert rig.ran == ["first", "second", "third"]
    assert rig.outcome(flow) == "succeeded"


def test_the_jobs_of_a_block_are_written_together(rig: Rig, session: Session) -> None:
    sent: list[str] = []
    event.listen(rig.engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
    with rig.queue.workflow(session) as flow:
        ids = [flow.add(rig.note.job("0")).id]
        for number in range(1, 100):
            ids.append(flow.add(rig.note.job(str(number)), after=ids[-1]).id)
        assert not [one for one in sent if "INTO pgqueue.jobs" in one]

    assert len(sent) < 10
    session.commit()
    assert session.scalars(select(Job.id).order_by(Job.id)).all() == ids
    assert rig.work() == {"succeeded": 100}
    assert rig.ran == [str(number) for number in range(100)]


def test_a_job_belongs_where_it_was_added_whenever_it_is_written(
    rig: Rig, session: Session
) -> None:
    with rig.queue.workflow(session) as flow:
        first = flow.add(rig.note.job("first"))
        with flow.group("part", after=first) as part:
            session.flush()
            inner = part.add(rig.note.job("inner"))
        last = flow.add(rig.note.job("last"), after=part)
        with rig.queue.batch(session) as batch:
            session.flush()

    assert rig.queue.get_batch(session, flow.id).total == 3
    assert rig.queue.get_batch(session, part.id).total == 1
    assert rig.queue.get_batch(session, batch.id).total == 0
    assert statuses(session) == {"first": "pending", "inner": "blocked", "last": "blocked"}
    assert (first.id, inner.id, last.id) == tuple(session.scalars(select(Job.id).order_by(Job.id)))
    session.commit()
    rig.work()
    assert rig.ran == ["first", "inner", "last"]


def test_a_taken_key_is_named_at_the_end_of_the_block(rig: Rig, session: Session) -> None:
    keyed = rig.note.options(unique_key="k")
    keyed.enqueue(session, "holder")
    session.commit()

    def add() -> None:
        with rig.queue.workflow(session) as flow:
            flow.add(rig.note.job("first"))
            flow.add(keyed.job("second"))

    with pytest.raises(DuplicateJob, match=r"<Job \d+ note>: .* unique key 'k'"):
        add()
    session.rollback()

    assert statuses(session) == {"holder": "pending"}


def test_a_job_waits_for_all_jobs_of_a_group(rig: Rig, session: Session) -> None:
    with rig.queue.workflow(session) as flow:
        root = flow.add(rig.note.job("root"))
        parts = flow.add_many(rig.note, [(f"part {n}",) for n in range(20)], after=root)
        flow.add(rig.note.job("last"), after=[parts, root])
    session.commit()

    rig.work()

    assert (rig.ran[0], rig.ran[-1], len(rig.ran)) == ("root", "last", 22)
    assert rig.outcome(flow) == "succeeded"


def test_a_group_holds_all_that_its_block_enqueues(rig: Rig, session: Session) -> None:
    with rig.queue.workflow(session) as flow:
        root = flow.add(rig.note.job("root"))
        with flow.group("outer", after=root) as outer:
            rig.note.enqueue(session, "enqueued")
            with flow.group("inner") as inner:
                session.add(rig.note.job("added"))
            outer.add(rig.note.job("after inner"), after=inner)
        with flow.after(outer):
            rig.note.enqueue_many(session, [("last",)])
    session.commit()

    rig.work()

    assert rig.ran[0] == "root"
    assert set(rig.ran[1:3]) == {"enqueued", "added"}
    assert rig.ran[3:] == ["after inner", "last"]


@pytest.mark.parametrize(
    ("when", "ran"),
    [
        ("succeeded", ["good"]),
        ("failed", ["good", "next"]),
        ("cancelled", ["good"]),
        ("ended", ["good", "next"]),
    ],
)
def test_a_failed_job_starts_those_that_run_when_it_fails(
    rig: Rig, session: Session, when: Any, ran: list[str]
) -> None:
    rig.failing = {"bad"}
    with rig.queue.workflow(session) as flow:
        both = [flow.add(rig.note.job(name)) for name in ("bad", "good")]
        flow.add(rig.note.job("next"), after=both, when=when)
    session.commit()

    rig.work()

    assert rig.ran == ran
    assert rig.outcome(flow) == "failed"


def test_a_branch_that_is_not_taken_stops_nothing(rig: Rig, session: Session) -> None:
    with rig.queue.workflow(session) as flow:
        root = flow.add(rig.note.job("root"))
        repair = flow.add(rig.note.job("repair"), after=root, when="failed")
        behind = flow.add(rig.note.job("behind"), after=repair)
        flow.add(rig.note.job("last"), after=[root, behind])
    session.commit()

    rig.work()

    assert rig.ran == ["root", "last"]
    skipped = dict.fromkeys(("repair", "behind"), "cancelled")
    assert statuses(session) == {"root": "succeeded", "last": "succeeded", **skipped}
    assert session.get_one(Job, behind.id).last_error == "skipped: not needed"
    assert rig.outcome(flow) == "succeeded"


def build_with_a_failure(rig: Rig, session: Session) -> tuple[OpenWorkflow, int]:
    with rig.queue.workflow(session, on_failure=rig.tell, on_success=rig.note_id) as flow:
        bad = flow.add(rig.note.job("bad"))
        second = flow.add(rig.note.job("second"), after=bad)
        group = flow.add_many(rig.note, [("part",)], after=second)
        flow.add(rig.note.job("last"), after=group)
        flow.add(rig.note.job("beside"))
    session.commit()
    rig.failing = {"bad"}
    rig.work()
    return flow, bad.id


def test_what_waits_for_a_failed_job_is_skipped(rig: Rig, session: Session) -> None:
    flow, bad = build_with_a_failure(rig, session)

    assert rig.ran == ["beside", "told"]
    skipped = dict.fromkeys(("second", "part", "last"), "cancelled")
    assert statuses(session) == {"bad": "failed", "beside": "succeeded", **skipped}
    errors = session.scalars(select(Job.last_error).where(Job.task == "note").order_by(Job.id))
    assert f"skipped: job {bad} has failed" in list(errors)
    assert rig.outcome(flow) == "failed"


def test_one_requeue_brings_back_all_that_was_skipped(rig: Rig, session: Session) -> None:
    flow, bad = build_with_a_failure(rig, session)
    rig.failing.clear()

    rig.queue.requeue(session, bad)
    session.commit()
    assert rig.outcome(flow) is None
    rig.work()

    assert rig.ran == ["beside", "told", "bad", "second", "part", "last", "done"]
    assert set(statuses(session).values()) == {"succeeded"}
    assert rig.outcome(flow) == "succeeded"


def test_a_requeue_of_many_brings_back_what_was_skipped(rig: Rig, session: Session) -> None:
    flow, _ = build_with_a_failure(rig, session)

    rig.queue.operate("ada").requeue(Selection(status="failed"))
    rig.work()  # fails again

    assert rig.ran == ["beside", "told", "told"]
    assert rig.outcome(flow) == "failed"
    rig.failing.clear()
    rig.queue.operate("ada").requeue(Selection(status="failed"))
    rig.work()
    assert rig.ran[3:] == ["bad", "second", "part", "last", "done"]


@pytest.mark.parametrize("in_group", [False, True])
def test_a_running_job_adds_jobs_before_its_successors_and_those_of_its_group(
    rig: Rig, session: Session, in_group: bool
) -> None:
    @rig.queue.task(name="grow")
    def grow(session: Session, ctx: JobContext) -> None:
        assert ctx.workflow_id is not None
        with rig.queue.extend_workflow(
            session, ctx.workflow_id, before_successors_of=ctx.job_id
        ) as flow:
            flow.add(rig.note.job("added"))

    with rig.queue.workflow(session) as flow:
        root = flow.add_many(grow, [()]) if in_group else flow.add(grow.job())
        flow.add(rig.note.job("last"), after=root)
    session.commit()

    rig.work()

    assert rig.ran == ["added", "last"]
    assert rig.outcome(flow) == "succeeded"


def test_a_blocked_job_that_is_cancelled_skips_what_waits_for_it(
    rig: Rig, session: Session
) -> None:
    with rig.queue.workflow(session, on_failure=rig.tell) as flow:
        root = flow.add(rig.note.job("root"))
        second = flow.add(rig.note.job("second"), after=root)
        flow.add(rig.note.job("last"), after=second)
    session.commit()

    rig.queue.cancel(session, second.id)
    session.commit()
    rig.work()

    assert rig.ran == ["root", "told"]
    assert statuses(session) == {"root": "succeeded", "second": "cancelled", "last": "cancelled"}
    assert rig.outcome(flow) == "cancelled"


def test_a_released_job_waits_for_its_limits(engine: Engine, session: Session) -> None:
    queue = PgQueue(engine)
    limited = queue.task(name="limited", limit=Limit(1))(lambda: None)
    first = queue.task(name="first")(lambda: None)
    with queue.workflow(session) as flow:
        root = flow.add(first.job())
        flow.add_many(limited, [()] * 3, after=root)
    session.commit()
    assert session.query(WaitingMessage).count() == 0

    assert endings(Worker(queue)) == {"succeeded": 4}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"when": "done"}, "when is 'done'; give one of"),
        ({"after": [0.5]}, "a job's id is needed here"),
        ({"after": Job()}, "has no id yet; flush the session"),
    ],
)
def test_wrong_values_are_refused(
    rig: Rig, session: Session, wrong: dict[str, Any], message: str
) -> None:
    with rig.queue.workflow(session) as flow, pytest.raises(PgQueueError, match=message):
        flow.add(rig.note.job("a"), **wrong)
    session.rollback()


def test_jobs_are_added_inside_of_the_block(rig: Rig, session: Session) -> None:
    with rig.queue.workflow(session) as flow:
        pass
    with pytest.raises(PgQueueError, match="inside of its `with` block"):
        flow.add(rig.note.job("late"))
    session.rollback()


def test_a_job_reads_the_results_of_those_for_which_it_waited(rig: Rig, session: Session) -> None:
    read: list[list[Any]] = []

    @rig.queue.task(name="read")
    def read_them(session: Session, ctx: JobContext) -> None:
        read.append(list(rig.queue.results(session, ctx.job_id, rig.note)))

    with rig.queue.workflow(session) as flow:
        other = flow.add(rig.note.job("not read"))
        first = flow.add(rig.note.job("first"), after=other)
        parts = flow.add_many(rig.note, [("a",), ("b",)])
        flow.add(read_them.job(), after=[first, parts])
    session.commit()

    rig.work()

    assert read == [["first", "a", "b"]]


def test_jobs_that_wait_for_others_are_listed_and_counted(rig: Rig, session: Session) -> None:
    with rig.queue.workflow(session) as flow:
        root = flow.add(rig.note.job("root"))
        flow.add_many(rig.note, [("a",), ("b",)], after=root)
    session.commit()

    counts = {(one.queue, one.status): one.jobs for one in rig.queue.counts(session)}
    assert counts["default", JobStatus.BLOCKED] == 2
    blocked = select(Job.args["name"].astext).where(Job.status == JobStatus.BLOCKED)
    assert set(session.scalars(blocked)) == {"a", "b"}
    assert rig.queue.cancel_batch(session, flow.id) == {Change.CANCELLED: 3}
    session.commit()
    rig.work()
    assert rig.outcome(flow) == "cancelled"


def test_a_test_runs_whole_workflows_in_its_transaction(engine: Engine) -> None:
    rig = Rig(engine)
    with rig.queue.session() as session:
        with rig.queue.workflow(session, on_success=rig.note_id) as flow:
            parts = flow.add_many(rig.note, [("a",), ("b",)])
            flow.add(rig.note.job("last"), after=parts)

        jobs = run_jobs(session, queue=rig.queue)

        assert rig.ran == ["a", "b", "last", "done"]
        assert len(jobs) == 4
        session.rollback()


def test_an_async_session_opens_workflows(rig: Rig, database_url: str) -> None:
    async def run() -> None:
        engine = create_async_engine(make_url(database_url).set(drivername="postgresql+asyncpg"))
        async with AsyncSession(engine, expire_on_commit=False) as session:
            async with rig.queue.workflow(session) as flow:
                root = await flow.add_async(rig.note.job("root"))
                async with flow.group("parts", after=root) as group:
                    await rig.note.enqueue_async(session, "part")
                parts = await flow.add_many_async(rig.note, [("other",)], after=group)
                await flow.add_async(rig.note.job("last"), after=[parts, group])
            await session.commit()
        await engine.dispose()

    asyncio.run(run())
    rig.work()

    assert rig.ran == ["root", "part", "other", "last"]


def test_nothing_of_a_workflow_stays_when_its_time_is_over(engine: Engine) -> None:
    rig = Rig(engine, application="shop")
    with (
        rig.queue.session() as session,
        session.begin(),
        rig.queue.workflow(session, on_success=rig.tell, on_failure=rig.note_id) as flow,
    ):
        parts = flow.add_many(rig.note, [("a",), ("b",)])
        flow.add(rig.note.job("last"), after=parts)
    rig.work()
    past = "SET {0} = {0} - interval '9 years'"
    execute(engine, f"UPDATE pgqueue.batches {past.format('ended_at')}")
    execute(engine, f"UPDATE pgqueue.jobs {past.format('finished_at')}")

    prune(rig)
    with engine.connect() as connection:
        for table in ("jobs", "batches", "batch_jobs", "blocked", "dependencies"):
            assert connection.scalar(text(f"SELECT count(*) FROM pgqueue.{table}")) == 0


def test_a_job_stays_while_another_waits_for_it(rig: Rig, session: Session) -> None:
    rig.failing = {"outside"}
    outside = rig.note.enqueue(session, "outside")
    session.commit()
    with rig.queue.workflow(session) as flow:
        later = flow.add(rig.note.options(delay=timedelta(hours=1)).job("later"))
        flow.add(rig.note.job("last"), after=[outside, later])
    session.commit()
    rig.work()
    execute(rig.engine, "UPDATE pgqueue.jobs SET finished_at = finished_at - interval '9 years'")

    prune(rig)
    rig.queue.run_now(session, later.id)
    session.commit()
    rig.work()

    assert rig.ran == ["later"]
    assert statuses(session)["last"] == "cancelled"


def prune(rig: Rig) -> None:
    prune_round = PruneRound(rig.queue.retention)
    with rig.engine.connect() as connection:
        while prune_round.step(connection) is RoundState.MORE:
            pass


@pytest.mark.journey
def test_what_has_not_ended_at_the_deadline_is_cancelled(engine: Engine) -> None:
    rig = Rig(engine)
    stopped = rig.queue.task(name="stopped")(rig.until_cancelled)
    with rig.queue.session() as session, session.begin():
        deadline = timedelta(seconds=1)
        with rig.queue.workflow(session, on_failure=rig.tell, deadline=deadline) as flow:
            first = flow.add(stopped.job())
            flow.add(rig.note.options(delay=timedelta(hours=1)).job("later"))
            flow.add(rig.note.job("second"), after=first)
            flow.add(rig.note.job("clean up"), after=first, when="cancelled")

    with running(Worker(rig.queue, concurrency=2)):
        wait_until(lambda: "told" in rig.ran, what="the workflow ends")

    assert rig.ran == ["clean up", "told"]
    assert rig.outcome(flow) == "cancelled"
    with rig.queue.session() as session:
        cancelled = dict.fromkeys(("later", "second"), "cancelled")
        assert statuses(session) == {**cancelled, "clean up": "succeeded"}


def test_a_skipped_job_that_is_requeued_waits_and_is_skipped_again(
    rig: Rig, session: Session
) -> None:
    flow, _ = build_with_a_failure(rig, session)
    second = session.scalars(select(Job).where(Job.args["name"].astext == "second")).one()

    assert rig.queue.requeue(session, second.id) == Change.REQUEUED
    session.commit()
    rig.work()

    assert rig.ran == ["beside", "told", "told"]
    assert statuses(session)["second"] == "cancelled"
    assert rig.outcome(flow) == "failed"


def test_failed_and_skipped_jobs_are_requeued_by_one_action(rig: Rig, session: Session) -> None:
    flow, _ = build_with_a_failure(rig, session)
    rig.failing.clear()

    rig.queue.operate("ada").requeue(Selection(batch=flow.id))
    rig.work()

    assert rig.ran[2:] == ["bad", "second", "part", "last", "done"]


def test_the_callback_for_another_outcome_comes_back_too(rig: Rig, session: Session) -> None:
    with rig.queue.workflow(session, on_failure=rig.tell, on_cancelled=rig.note_id) as flow:
        only = flow.add(rig.note.job("only"))
    rig.queue.cancel(session, only.id)
    session.commit()
    rig.work()
    assert rig.ran == ["done"]
    rig.failing = {"only"}

    rig.queue.requeue(session, only.id)
    session.commit()
    rig.work()

    assert rig.ran == ["done", "told"]
    assert rig.outcome(flow) == "failed"


def test_what_waits_for_a_group_of_which_no_job_is_needed_is_not_needed(
    rig: Rig, session: Session
) -> None:
    with rig.queue.workflow(session) as flow:
        root = flow.add(rig.note.job("root"))
        repairs = flow.add_many(rig.note, [("a",), ("b",)], after=root, when="failed")
        flow.add(rig.note.job("behind"), after=repairs)
    session.commit()

    rig.work()

    assert rig.ran == ["root"]
    skipped = dict.fromkeys(("a", "b", "behind"), "cancelled")
    assert statuses(session) == {"root": "succeeded", **skipped}
    assert rig.outcome(flow) == "succeeded"


def test_a_skipped_job_whose_key_is_taken_stays_skipped(rig: Rig, session: Session) -> None:
    keyed = rig.note.options(unique=Unique(key="k"))
    rig.failing = {"bad"}
    with rig.queue.workflow(session) as flow:
        bad = flow.add(rig.note.job("bad"))
        flow.add(keyed.job("second"), after=bad)
    session.commit()
    rig.work()
    other = keyed.options(delay=timedelta(hours=1)).enqueue(session, "other")
    rig.failing.clear()

    rig.queue.requeue(session, bad.id)
    session.commit()
    rig.work()

    found = statuses(session)
    assert found == {"bad": "succeeded", "second": "cancelled", "other": "pending"}
    assert other.is_new
    assert rig.outcome(flow) == "failed"


def test_a_batch_and_a_workflow_are_extended_each_by_its_own(rig: Rig, session: Session) -> None:
    with rig.queue.workflow(session) as flow:
        rig.note.enqueue(session, "a")
    with rig.queue.batch(session) as batch:
        rig.note.enqueue(session, "b")

    with pytest.raises(BatchNotFound, match="is a workflow; use extend_workflow"):
        rig.queue.extend_batch(session, flow.id).__enter__()
    with pytest.raises(BatchNotFound, match="is no workflow; use extend_batch"):
        rig.queue.extend_workflow(session, batch.id).__enter__()
    session.rollback()


def test_what_cannot_wait_is_refused(rig: Rig, session: Session) -> None:
    with rig.queue.workflow(session) as flow:
        first = flow.add(rig.note.job("first"))
        with pytest.raises(OptionError, match="is open; a job can wait for it when"):
            flow.add(rig.note.job("a"), after=flow)
        with pytest.raises(OptionError, match="after is -5; give the id of a job"):
            flow.add(rig.note.job("a"), after=-5)
        with flow.group(after=first, when="failed") as group:
            with pytest.raises(OptionError, match="wait already, with another when"):
                group.add(rig.note.job("a"), after=first)
            rig.note.enqueue(session, "b")
    with (
        rig.queue.extend_workflow(session, flow.id, before_successors_of=first.id) as more,
        pytest.raises(OptionError, match="cannot wait for others"),
    ):
        more.add(rig.note.job("a"), after=group)
    session.rollback()


def test_a_handler_of_a_failure_sees_one_that_came_earlier(rig: Rig, session: Session) -> None:
    rig.failing = {"bad"}
    with rig.queue.workflow(session) as flow:
        bad = flow.add(rig.note.job("bad"))
        second = flow.add(rig.note.job("second"), after=bad)
        third = flow.add(rig.note.job("third"), after=second)
        flow.add(rig.note.job("clean up"), after=third, when="failed")
        flow.add(rig.note.job("not this"), after=third, when="cancelled")
    session.commit()

    rig.work()

    assert rig.ran == ["clean up"]
    assert session.get_one(Job, third.id).last_error == f"skipped: job {bad.id} has failed"


def test_a_requeue_brings_back_all_that_follows_also_what_has_run(
    rig: Rig, session: Session
) -> None:
    rig.failing = {"bad"}
    with rig.queue.workflow(session, on_failure=rig.tell) as flow:
        bad = flow.add(rig.note.job("bad"))
        flow.add(rig.note.job("clean up"), after=bad, when="failed")
        flow.add(rig.note.job("always"), after=bad, when="ended")
    session.commit()
    rig.work()
    assert sorted(rig.ran) == ["always", "clean up", "told"]
    rig.ran.clear()

    rig.queue.requeue(session, bad.id)
    session.commit()
    rig.work()
    assert sorted(rig.ran) == ["always", "clean up", "told"]

    rig.failing.clear()
    rig.queue.requeue(session, bad.id)
    session.commit()
    rig.work()
    assert rig.ran[3:] == ["bad", "always"]
    assert rig.outcome(flow) == "succeeded"
    assert statuses(session)["clean up"] == "cancelled"


def test_a_cancelled_workflow_is_requeued_in_order(rig: Rig, session: Session) -> None:
    with rig.queue.workflow(session) as flow:
        last = flow.add(rig.note.options(delay=timedelta(hours=1)).job("first"))
        for name in ("second", "third"):
            last = flow.add(rig.note.job(name), after=last)
    session.commit()
    rig.queue.cancel_batch(session, flow.id)
    session.commit()
    rig.work()
    assert rig.outcome(flow) == "cancelled"

    rig.queue.operate("ada").requeue(Selection(batch=flow.id))
    rig.work()

    assert rig.ran == ["first", "second", "third"]
    assert rig.outcome(flow) == "succeeded"


def test_a_job_that_waits_keeps_its_key(rig: Rig, session: Session) -> None:
    unique = Unique(by=(), until="started", on_conflict="replace")
    keyed = rig.queue.task(name="keyed", unique=unique)(rig.append)
    with rig.queue.workflow(session) as flow:
        first = flow.add(rig.note.job("first"))
        waiting = keyed.options(unique=Unique(by=(), until="started")).job("a")
        flow.add(waiting, after=first)
    session.commit()

    with pytest.raises(DuplicateJob, match="waits for other jobs"):
        keyed.enqueue(session, "b")
    session.rollback()
    rig.work()

    assert rig.ran == ["first", "a"]


def test_a_handler_behind_a_group_sees_a_failure_before_it(rig: Rig, session: Session) -> None:
    rig.failing = {"bad"}
    with rig.queue.workflow(session) as flow:
        bad = flow.add(rig.note.job("bad"))
        parts = flow.add_many(rig.note, [("a",), ("b",)], after=bad)
        flow.add(rig.note.job("clean up"), after=parts, when="failed")
        flow.add(rig.note.job("not this"), after=parts, when="cancelled")
    session.commit()

    rig.work()

    assert rig.ran == ["clean up"]


def test_a_workflow_of_which_nothing_comes_back_stays_ended(rig: Rig, session: Session) -> None:
    rig.failing = {"bad"}
    with rig.queue.workflow(session) as flow:
        bad = flow.add(rig.note.job("bad"))
    with rig.queue.workflow(session, on_success=rig.note_id) as other:
        other.add(rig.note.job("after the other"), after=bad, when="ended")
    session.commit()
    rig.work()
    assert rig.ran == ["after the other", "done"]

    rig.queue.requeue(session, bad.id)
    session.commit()

    assert rig.outcome(other) == "succeeded"
    assert rig.outcome(flow) is None
    rig.failing.clear()
    rig.work()
    assert rig.ran == ["after the other", "done", "bad"]


class TestRestart:
    """A restart copies a job and what follows it; the copies read what is old."""

    def test_copies_read_the_results_of_old_jobs(self, rig: Rig, session: Session) -> None:
        queue = rig.queue

        @queue.task
        def add_up(session: Session, ctx: JobContext) -> list[str]:
            return sorted(queue.results(session, ctx.job_id, rig.note))

        @queue.task
        def end(workflow_id: int) -> None:
            rig.append(f"end of {workflow_id}")

        with session.begin(), queue.workflow(session, "w", on_success=end) as flow:
            first = flow.add(rig.note.job("first"))
            with flow.group("parts", after=first) as parts:
                parts.add(rig.note.job("a"))
                again = parts.add(rig.note.job("b"))
            total = flow.add(add_up.job(), after=parts)
            flow.add(rig.note.job("last"), after=total)
            ids = (flow.id, again.id)
        with running(Worker(queue)):
            wait_until(lambda: len(rig.ran) == 5)
            rig.ran.clear()

            with session.begin():
                new_id = queue.restart_workflow(session, ids[1])
            wait_until(lambda: len(rig.ran) == 3)

        assert rig.ran == ["b", "last", f"end of {new_id}"]
        with session.begin():
            old, new = (queue.get_batch(session, id) for id in (ids[0], new_id))
            results = [job.result for job in session.scalars(select(Job).order_by(Job.id))]
            assert [violation.rule for violation in queue.check(session)] == []
        assert (old.outcome, old.total) == ("succeeded", 5)
        assert (new.name, new.outcome, new.total) == ("w", "succeeded", 3)
        assert results.count(["a", "b"]) == 2, "the copy has read the old a and the new b"

    def test_a_copy_waits_again_for_what_waits_again(self, rig: Rig, session: Session) -> None:
        with session.begin(), rig.queue.workflow(session) as flow:
            jobs = [flow.add(rig.note.job("0"))]
            for n in range(1, 5):
                jobs.append(flow.add(rig.note.job(str(n)), after=[jobs[n - 1], jobs[0]]))
            second = jobs[1].id
        Worker(rig.queue).run_until_empty(timeout=60)

        with session.begin():
            new_id = rig.queue.restart_workflow(session, second)
            statuses = session.scalars(
                select(Job.status).where(Job.id > jobs[-1].id).order_by(Job.id)
            ).all()
        Worker(rig.queue).run_until_empty(timeout=60)

        assert statuses == [JobStatus.BLOCKED] * 4
        assert rig.ran == ["0", "1", "2", "3", "4", "1", "2", "3", "4"]
        with session.begin():
            assert rig.queue.get_batch(session, new_id).outcome == "succeeded"

    def test_a_restart_waits_for_a_requeue_that_opens_the_workflow(
        self, rig: Rig, session: Session
    ) -> None:
        rig.failing.add("fails")
        with session.begin(), rig.queue.workflow(session) as flow:
            failed, other = (flow.add(rig.note.job(name)).id for name in ("fails", "other"))
        Worker(rig.queue).run_until_empty(timeout=60)

        with rig.queue.session() as requeuer, requeuer.begin():
            rig.queue.requeue(requeuer, failed)
            flow_before = rig.queue.get_batch(requeuer, flow.id).outcome
            session.begin()
            session.execute(text("SET LOCAL lock_timeout = '50ms'"))
            with pytest.raises(DBAPIError, match="lock timeout"):
                rig.queue.restart_workflow(session, other)
            session.rollback()
        with pytest.raises(OptionError, match="has not ended"), session.begin():
            rig.queue.restart_workflow(session, other)
        assert flow_before is None

    def test_what_cannot_be_restarted_is_refused(self, rig: Rig, session: Session) -> None:
        queue, unique = rig.queue, rig.note.options(unique_key="k")
        with session.begin(), queue.workflow(session, on_success=rig.note_id) as flow:
            first = flow.add(unique.job("x")).id
        with session.begin():
            plain = rig.note.enqueue(session, "plain").id

        def refused(job_id: int, error: type[PgQueueError] = OptionError) -> str:
            with pytest.raises(error) as caught, session.begin():
                queue.restart_workflow(session, job_id)
            return str(caught.value)

        assert "belongs to no workflow" in refused(plain)
        assert "has not ended" in refused(first)
        Worker(queue).run_until_empty(timeout=60)
        with session.begin():
            callback = queue.get_batch(session, flow.id).callback_id
            holder = unique.enqueue(session, "y").id
        assert callback is not None
        assert "callback" in refused(callback)
        assert f"unique key 'k' of job {first}" in refused(first, DuplicateJob)
        with session.begin():
            assert set(session.scalars(select(Job.id))) == {first, callback, plain, holder}

    def test_a_job_that_holds_its_own_key_is_not_copied(self, rig: Rig, session: Session) -> None:
        unique = Unique(by="name", until="succeeded")
        rig.failing.add("x")
        with session.begin(), rig.queue.workflow(session) as flow:
            first = flow.add(rig.note.options(unique=unique).job("x")).id
        rig.work()

        words = (
            "held by this job or by another one.*requeue this job.*has succeeded, or was deleted"
        )
        with pytest.raises(DuplicateJob, match=words), session.begin():
            rig.queue.restart_workflow(session, first)
