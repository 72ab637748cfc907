"""Schedules at run time: each method joins the caller's transaction, and refuses what is wrong."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from pgqueue import (
    ArgumentsError,
    DuplicateSchedule,
    Job,
    JobStatus,
    Limit,
    NoTransaction,
    OptionError,
    PayloadError,
    PgQueue,
    ScheduleNotFound,
    TaskDefinitionError,
    Unique,
    UnknownOption,
    UnknownTask,
    Worker,
)
from pgqueue.tables import Schedule

MINUTE = timedelta(minutes=1)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


@pytest.fixture
def task(queue: PgQueue) -> Any:
    @queue.task(name="report")
    def report(customer_id: int, day: datetime | None = None) -> None: ...

    return report


@pytest.fixture
def added(queue: PgQueue, task: Any) -> None:
    with queue.session() as session, session.begin():
        queue.schedules.add(
            session, task, "0 7 * * *", name="report:7", timezone="Asia/Tokyo", args=(7,)
        )


def only(queue: PgQueue) -> Any:
    with queue.session() as session:
        [state] = queue.schedules.list(session)
        return state


class TestAdd:
    def test_a_schedule_stands_at_its_next_tick(self, queue: PgQueue, added: None) -> None:
        state = only(queue)

        local = [tick.astimezone(UTC).strftime("%H:%M") for tick in state.next_runs(3)]
        assert local == ["22:00"] * 3
        assert state.next_runs(1) == [state.next_at]
        assert (state.task, state.catch_up, state.overlap) == ("report", 1, "allow")
        assert state.declared_in is None

    def test_an_added_schedule_joins_the_transaction_of_the_caller(
        self, queue: PgQueue, task: Any, session: Session
    ) -> None:
        queue.schedules.add(session, task, "0 7 * * *", name="gone", args=(7,))
        session.rollback()

        assert queue.schedules.list(session) == []

    def test_a_taken_name_is_refused_and_the_transaction_goes_on(
        self, queue: PgQueue, task: Any, added: None, session: Session
    ) -> None:
        with pytest.raises(DuplicateSchedule, match="report:7: there is one with this name"):
            queue.schedules.add(session, task, every=MINUTE, name="report:7", args=(8,))

        assert len(queue.schedules.list(session)) == 1

    def test_a_wrong_schedule_is_refused_before_anything_is_written(
        self, queue: PgQueue, task: Any, session: Session
    ) -> None:
        wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"cron": "0 25 * * *"}, OptionError, "field 2, the hour"),
            ({"args": (1, 2, 3)}, ArgumentsError, "report"),
            ({"args": {"customer": 7}}, ArgumentsError, "customer"),
            ({"args": [7]}, ArgumentsError, "args is list"),
            ({"args": ("\x00", None)}, ArgumentsError, "customer_id"),
            ({"catch_up": "all"}, OptionError, "catch_up"),
            ({"overlap": "queue"}, OptionError, "overlap"),
            ({"delay": MINUTE}, UnknownOption, "no option 'delay'"),
            ({"priority": 10}, OptionError, "priority"),
            ({"unique_key": len}, OptionError, "unique_key"),
            ({"name": "two words"}, OptionError, "without spaces"),
        ]
        for given, error, words in wrong:
            call = {"cron": "0 7 * * *", "name": "x", "args": (7,), **given}
            with pytest.raises(error, match=words):
                queue.schedules.add(session, task, call.pop("cron"), **call)

        assert queue.schedules.list(session) == []

    def test_a_function_is_no_task(self, queue: PgQueue, session: Session) -> None:
        with pytest.raises(TaskDefinitionError, match=r"give a function that has @queue\.task"):
            queue.schedules.add(session, print, "0 7 * * *", name="x")  # type: ignore[arg-type]

    def test_an_async_session_adds_schedules_too(
        self, queue: PgQueue, task: Any, engine: Engine
    ) -> None:
        async def add() -> None:
            asynchronous = create_async_engine(engine.url)
            async with AsyncSession(asynchronous) as session, session.begin():
                await session.run_sync(
                    queue.schedules.add, task, "0 7 * * *", name="async", args=(7,)
                )
            await asynchronous.dispose()

        asyncio.run(add())

        assert only(queue).name == "async"


def test_a_task_with_other_options_is_refused_because_a_schedule_would_lose_them(
    queue: PgQueue, task: Any
) -> None:
    with pytest.raises(OptionError, match=r"schedule report: .* give queue, priority"):
        queue.schedule("0 7 * * *", args=(7,))(task.options(tags=["x"]))
    with queue.session() as session, pytest.raises(OptionError, match="schedule other: "):
        queue.schedules.add(session, task.options(node=7), "0 7 * * *", name="other", args=(7,))


class TestChange:
    def test_a_new_rule_has_another_next_tick(
        self, queue: PgQueue, added: None, session: Session
    ) -> None:
        queue.schedules.change(session, "report:7", "30 8 * * *")
        [state] = queue.schedules.list(session)

        assert state.cron == "30 8 * * *"
        assert state.timezone == "Asia/Tokyo"
        assert state.next_at is not None
        assert state.next_at.astimezone(UTC).strftime("%H:%M") == "23:30"

    def test_an_interval_replaces_an_expression(
        self, queue: PgQueue, added: None, session: Session
    ) -> None:
        queue.schedules.change(session, "report:7", every=MINUTE)
        [state] = queue.schedules.list(session)

        assert (state.cron, state.every) == (None, MINUTE)

    def test_what_a_change_of_a_schedule_does_not_give_stays(
        self, queue: PgQueue, added: None, session: Session
    ) -> None:
        [before] = queue.schedules.list(session)
        queue.schedules.change(session, "report:7", args={"customer_id": 8}, priority=1)
        queue.schedules.change(session, "report:7", tags=["eu"], overlap="skip")
        [state] = queue.schedules.list(session)
        row = session.scalars(select(Schedule)).one()

        assert state.next_at == before.next_at
        assert row.args == {"customer_id": 8}
        assert row.options == {"priority": 1, "tags": ["eu"]}
        assert state.overlap == "skip"

    def test_a_tick_that_was_fired_does_not_come_again_when_the_rule_is_changed_back(
        self, queue: PgQueue, added: None, session: Session
    ) -> None:
        """As after a failover to a server whose clock is a day behind."""
        fired = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
        session.execute(
            text("UPDATE pgqueue.schedules SET next_at = :next, last_tick_at = :fired"),
            {"fired": fired, "next": fired + MINUTE},
        )

        queue.schedules.change(session, "report:7", every=MINUTE)
        queue.schedules.change(session, "report:7", "* * * * *")
        queue.schedules.pause(session, "report:7")
        queue.schedules.resume(session, "report:7")

        [state] = queue.schedules.list(session)
        assert state.next_at is not None
        assert state.next_at > fired

    def test_bad_values_of_a_changed_schedule_are_refused(
        self, queue: PgQueue, added: None, session: Session
    ) -> None:
        for error, given in [
            (OptionError, {"cron": "x"}),
            (OptionError, {"cron": ""}),
            (OptionError, {"timezone": "Mars"}),
            (OptionError, {"timezone": ""}),
            (OptionError, {"overlap": ""}),
            (OptionError, {"catch_up": "none", "overlap": "wait"}),
            (ArgumentsError, {"args": (1, 2, 3)}),
            (UnknownOption, {"run_at": MINUTE}),
        ]:
            with pytest.raises(error, match="report"):
                queue.schedules.change(session, "report:7", **given)  # type: ignore[arg-type]


class TestPause:
    def test_a_paused_schedule_has_no_next_run(
        self, queue: PgQueue, added: None, session: Session
    ) -> None:
        queue.schedules.pause(session, "report:7")
        [state] = queue.schedules.list(session)

        assert state.paused_at is not None
        assert state.next_runs(3) == []

    def test_the_ticks_of_a_pause_are_not_made_up(
        self, queue: PgQueue, added: None, session: Session
    ) -> None:
        queue.schedules.pause(session, "report:7")
        session.execute(text("UPDATE pgqueue.schedules SET next_at = now() - interval '3 days'"))
        queue.schedules.resume(session, "report:7")
        [state] = queue.schedules.list(session)

        assert state.paused_at is None
        assert state.next_at is not None
        assert state.next_at > state.read_at


class TestTrigger:
    def test_a_trigger_enqueues_a_job_now_and_the_schedule_stays_where_it_is(
        self, queue: PgQueue, added: None, session: Session
    ) -> None:
        [before] = queue.schedules.list(session)
        queue.schedules.pause(session, "report:7")

        job = session.get_one(Job, queue.schedules.trigger(session, "report:7"))

        [after] = queue.schedules.list(session)
        assert job.args == {"customer_id": 7}
        assert job.meta == {"schedule": {"name": "report:7", "tick": None}}
        assert (after.next_at, after.last_job_id) == (before.next_at, None)

    def test_hooks_and_options_apply_to_a_triggered_job(
        self, queue: PgQueue, task: Any, session: Session
    ) -> None:
        queue.on_enqueue(lambda task: {"tenant": "acme"})
        queue.schedules.add(
            session,
            task,
            every=MINUTE,
            name="x",
            args=(7, datetime(2026, 1, 1, tzinfo=UTC)),
            queue="slow",
            priority=9,
            max_attempts=3,
            unique_key="one",
            meta={"a": 1},
            tags=["t"],
        )

        job = session.get_one(Job, queue.schedules.trigger(session, "x"))
        again = queue.schedules.trigger(session, "x")

        assert again == job.id, "the job that holds the unique key"
        assert (job.queue, job.priority, job.max_attempts) == ("slow", 9, 3)
        assert job.meta is not None
        assert job.meta["tenant"] == "acme"
        assert job.meta["a"] == 1
        assert job.tags == ["t"]

    def test_a_task_that_this_application_does_not_have_is_named(
        self, queue: PgQueue, added: None, session: Session, engine: Engine
    ) -> None:
        with pytest.raises(UnknownTask, match="report"):
            PgQueue(engine).schedules.trigger(session, "report:7")

    def test_arguments_of_another_version_are_refused(
        self, queue: PgQueue, added: None, session: Session
    ) -> None:
        session.execute(text("""UPDATE pgqueue.schedules SET args = '{"customer_id": "x"}'"""))

        with pytest.raises(PayloadError, match="customer_id"):
            queue.schedules.trigger(session, "report:7")

    def test_a_triggered_job_replaces_the_one_that_waits(self, queue: PgQueue) -> None:
        @queue.task(name="index", unique=Unique(by=(), on_conflict="replace"))
        def index(page: int) -> None: ...

        with queue.session() as session, session.begin():
            waiting = index.options(delay=MINUTE).enqueue(session, 1)
            queue.schedules.add(session, index, "0 7 * * *", name="index", args=(2,))
            assert queue.schedules.trigger(session, "index") == waiting.id
            session.refresh(waiting)
            assert waiting.args == {"page": 2}

    def test_in_autocommit_a_triggered_job_that_may_replace_another_is_refused(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        @queue.task(name="index", unique=Unique(by=(), on_conflict="replace"))
        def index() -> None: ...

        with queue.session() as session, session.begin():
            queue.schedules.add(session, index, "0 7 * * *", name="index")
        with (
            Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session,
            pytest.raises(NoTransaction, match=r"'replace': .* or another on_conflict"),
        ):
            queue.schedules.trigger(session, "index")

    def test_a_taken_key_of_a_trigger_is_no_error_whatever_the_task_says(
        self, queue: PgQueue
    ) -> None:
        @queue.task(name="short", unique_key=lambda: "short", on_duplicate="raise")
        def short() -> None: ...

        @queue.task(name="long", unique=Unique(by=(), on_conflict="raise"))
        def long() -> None: ...

        with queue.session() as session, session.begin():
            for task in (short, long):
                waiting = task.options(delay=MINUTE).enqueue(session)
                queue.schedules.add(session, task, "0 7 * * *", name=task.name)
                assert queue.schedules.trigger(session, task.name) == waiting.id

    def test_a_triggered_job_waits_for_the_limits_of_its_task(self, queue: PgQueue) -> None:
        @queue.task(name="limited", limit=Limit(0))
        def limited() -> None: ...

        with queue.session() as session, session.begin():
            queue.schedules.add(session, limited, "0 7 * * *", name="limited")
            job = session.get_one(Job, queue.schedules.trigger(session, "limited"))
            assert (job.limit_keys, job.status) == ("limited", JobStatus.BLOCKED)

    def test_a_test_triggers_a_schedule_and_runs_its_job(self, queue: PgQueue, added: None) -> None:
        with queue.session() as session, session.begin():
            queue.schedules.trigger(session, "report:7")

        assert Worker(queue).run_until_empty() == {"succeeded": 1}


@pytest.mark.parametrize("method", ["pause", "resume", "remove", "trigger", "change"])
def test_an_unknown_name_is_told(queue: PgQueue, session: Session, method: str) -> None:
    with pytest.raises(ScheduleNotFound, match="schedule nightly does not exist"):
        getattr(queue.schedules, method)(session, "nightly")


@pytest.mark.parametrize("method", ["pause", "resume", "remove", "trigger", "change"])
def test_what_is_no_name_is_told_and_leaves_the_transaction_usable(
    queue: PgQueue, added: None, session: Session, method: str
) -> None:
    names: list[Any] = ["", "a\x00b", "\ud800", "x" * 5000, 7, None]
    for name in names:
        with pytest.raises(ScheduleNotFound, match="does not exist") as refused:
            getattr(queue.schedules, method)(session, name)

        assert len(str(refused.value)) < 200
    assert [one.name for one in queue.schedules.list(session)] == ["report:7"]


def test_a_removed_schedule_is_gone(queue: PgQueue, added: None, session: Session) -> None:
    queue.schedules.remove(session, "report:7")

    assert queue.schedules.list(session) == []


class TestDeclared:
    """``@queue.schedule``, and what a worker writes of it when it starts."""

    def test_two_schedules_of_a_task_need_two_names(self, queue: PgQueue, task: Any) -> None:
        queue.schedule("0 3 * * *", args=(1,))(task)
        queue.schedule("0 4 * * *", args=(1,), name="later")(task)

        assert set(queue.schedules.declared) == {"report", "later"}
        with pytest.raises(TaskDefinitionError, match="schedule report is declared already"):
            queue.schedule("0 5 * * *", args=(1,))(task)

    def test_a_bad_rule_of_a_declared_schedule_names_it(self, queue: PgQueue, task: Any) -> None:
        with pytest.raises(OptionError, match=r"^schedule report: timezone is 'Berlin'"):
            queue.schedule("0 3 * * *", timezone="Berlin")(task)

    def test_a_module_with_schedules_may_be_loaded_again(self, queue: PgQueue) -> None:
        for hour in (3, 4):

            @queue.schedule(f"0 {hour} * * *")
            @queue.task(name="nightly")
            def nightly() -> None: ...

        assert queue.schedules.declared["nightly"].rule.cron == "0 4 * * *"

    def test_another_task_may_not_take_the_name_of_a_schedule(
        self, queue: PgQueue, task: Any
    ) -> None:
        queue.schedule("0 3 * * *", args=(1,), name="nightly")(task)

        with pytest.raises(TaskDefinitionError, match="for task report"):

            @queue.schedule("0 3 * * *", name="nightly")
            @queue.task
            def other() -> None: ...

    def test_the_decorator_of_a_schedule_stands_above_that_of_the_task(
        self, queue: PgQueue
    ) -> None:
        with pytest.raises(TaskDefinitionError, match=r"above @queue\.task"):

            @queue.schedule("0 3 * * *")  # type: ignore[type-var]
            def nightly() -> None: ...

    def test_arguments_of_a_schedule_are_checked_where_they_are_declared(
        self, queue: PgQueue, task: Any
    ) -> None:
        with pytest.raises(ArgumentsError, match="customer_id"):
            queue.schedule("0 3 * * *")(task)

    def test_a_worker_writes_the_declared_schedules(self, queue: PgQueue, task: Any) -> None:
        queue.schedule("0 3 * * *", args=(1,), timezone="Europe/Berlin", priority=1)(task)
        synchronise(queue)
        first = only(queue)
        synchronise(queue)

        assert first.declared_in == __name__
        assert (first.cron, first.timezone) == ("0 3 * * *", "Europe/Berlin")
        assert only(queue).next_at == first.next_at

    def test_a_change_of_a_schedule_at_run_time_lasts_until_the_code_changes(
        self, queue: PgQueue, task: Any, engine: Engine
    ) -> None:
        queue.schedule("0 3 * * *", args=(1,))(task)
        synchronise(queue)
        with queue.session() as session, session.begin():
            queue.schedules.change(session, "report", "0 4 * * *")
            queue.schedules.pause(session, "report")
        synchronise(queue)
        assert only(queue).cron == "0 4 * * *"

        synchronise(other := declaring(engine, "0 5 * * *"))

        assert only(other).cron == "0 5 * * *"
        assert only(other).paused_at is not None, "the code says nothing of a pause"

    def test_a_deploy_that_changes_only_arguments_keeps_a_tick_that_was_missed(
        self, queue: PgQueue, task: Any, engine: Engine
    ) -> None:
        queue.schedule("0 3 * * *", args=(1,))(task)
        synchronise(queue)
        with engine.begin() as connection:
            connection.execute(text("UPDATE pgqueue.schedules SET next_at = now() - interval '1h'"))
        missed = only(queue).next_at

        other = PgQueue(engine)
        changed = other.task(name="report")(lambda customer_id: None)
        other.schedule("0 3 * * *", args=(2,), priority=1)(changed)
        synchronise(other)

        assert only(queue).next_at == missed
        synchronise(declaring(engine, "0 4 * * *"))
        assert only(queue).next_at > missed, "another rule moves the next tick"

    def test_a_schedule_that_the_code_no_longer_has_is_paused_and_told(
        self, queue: PgQueue, task: Any, engine: Engine, caplog: pytest.LogCaptureFixture
    ) -> None:
        queue.schedule("0 3 * * *", args=(1,))(task)
        synchronise(queue)

        synchronise(declaring(engine))

        assert only(queue).paused_at is not None
        assert "schedule report: the code declares it no longer" in caplog.text
        synchronise(queue)
        assert only(queue).paused_at is None, "it has come back"

    def test_an_application_pauses_its_own_schedules_only(
        self, engine: Engine, caplog: pytest.LogCaptureFixture
    ) -> None:
        shop = declaring(engine, "0 3 * * *", application="shop")
        synchronise(shop)

        synchronise(declaring(engine, application="bank"))
        synchronise(declaring(engine, "0 4 * * *", application="bank"))

        assert (only(shop).cron, only(shop).paused_at) == ("0 3 * * *", None)
        assert "application shop declares a schedule with this name" in caplog.text
        synchronise(declaring(engine, application="shop"))
        assert only(shop).paused_at is not None

    def test_a_schedule_becomes_that_of_the_application_when_this_gets_a_name(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        synchronise(declaring(engine, "0 3 * * *"))
        synchronise(declaring(engine, "0 3 * * *", application="shop"))

        synchronise(declaring(engine, application="shop"))

        assert only(queue).paused_at is not None

    def test_a_schedule_paused_by_hand_stays_so_when_a_release_without_it_ran_between(
        self, queue: PgQueue, task: Any, engine: Engine
    ) -> None:
        queue.schedule("0 3 * * *", args=(1,))(task)
        synchronise(queue)
        with queue.session() as session, session.begin():
            queue.schedules.pause(session, "report")

        synchronise(declaring(engine))
        synchronise(queue)

        assert only(queue).paused_at is not None

    def test_the_schedules_of_other_applications_and_of_the_application_are_left_alone(
        self, queue: PgQueue, task: Any, added: None
    ) -> None:
        with queue.session() as session, session.begin():
            queue.schedules.add(session, task, every=MINUTE, name="theirs", args=(1,))
            session.execute(
                text(
                    "UPDATE pgqueue.schedules SET declared_in = 'elsewhere', declaration = '{}'"
                    " WHERE name = 'theirs'"
                )
            )
        synchronise(queue)

        with queue.session() as session:
            assert [one.paused_at for one in queue.schedules.list(session)] == [None, None]

    def test_workers_that_start_together_write_each_schedule_once(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        for cron in ("0 3 * * *", "0 4 * * *"):
            queues = [declaring(engine, cron) for _ in range(6)]
            with ThreadPoolExecutor(6) as threads:
                list(threads.map(synchronise, queues))

            assert only(queue).cron == cron

    def test_a_schedule_that_the_application_has_added_stays_its_own(
        self, queue: PgQueue, task: Any, added: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        queue.schedule("0 3 * * *", args=(1,), name="report:7")(task)
        synchronise(queue)

        assert only(queue).cron == "0 7 * * *"
        assert "give the one of the code another name" in caplog.text


def declaring(engine: Engine, *crons: str, application: str = "") -> PgQueue:
    """The same application in another release."""
    queue = PgQueue(engine, application=application)

    @queue.task(name="report")
    def report(customer_id: int) -> None: ...

    for cron in crons:
        queue.schedule(cron, args=(1,))(report)
    return queue


def synchronise(queue: PgQueue) -> None:
    with queue.engine.begin() as connection:
        queue.schedules.synchronise(connection)
