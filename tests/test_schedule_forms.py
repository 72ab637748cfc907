"""More of schedules: words, both days, arguments made at the tick, ticks of the past."""

import re
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from shop_rig import assert_one_line, command
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session
from visitor import Visitor

from pgqueue import ArgumentsError, Job, OptionError, PgQueue, ScheduleNotFound, Worker
from pgqueue.repository.tables import array_of
from pgqueue.rules.ticks import ScheduleRule, checked_rule
from pgqueue.tables import OperatorAction, Schedule
from pgqueue.worker.duties.ticks import Ticks

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def jobs(queue: PgQueue) -> list[Job]:
    with queue.session() as session:
        return list(session.scalars(select(Job).order_by(Job.id)))


def fire(queue: PgQueue) -> None:
    """Fire the ticks that are due."""
    ticks = Ticks(queue.tasks, array_of(queue.tasks), queue.schedules)
    with queue.engine.connect() as connection:
        ticks.fire(connection)
    ticks.close()


@pytest.mark.parametrize(
    ("word", "cron"),
    [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        (" @midnight", "0 0 * * *"),
        ("@weekly", "0 0 * * 0"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 1 *"),
        ("@annually", "0 0 1 1 *"),
    ],
)
def test_a_word_is_an_expression(word: str, cron: str) -> None:
    assert checked_rule("", word, None, "UTC") == ScheduleRule(cron, None, "UTC")


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("@reboot", "there is no @reboot"),
        ("@dayly", "needs five fields, not 1: .* or one of @hourly, @daily"),
    ],
)
def test_other_words_are_refused(cron: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        checked_rule("", cron, None, "UTC")


class TestBothDays:
    def test_a_day_matches_both(self) -> None:
        rule = checked_rule("", "0 3 2-8 * WED", None, "UTC", "and")

        ticks = rule.ticks(NOW)

        # The Wednesdays after the first Tuesdays.
        assert [next(ticks).date() for _ in range(3)] == [
            date(2030, 1, 2),
            date(2030, 2, 6),
            date(2030, 3, 6),
        ]
        assert rule.in_words().endswith("if it's on Wednesday")

    @pytest.mark.parametrize(
        ("cron", "every", "days", "words"),
        [
            ("0 3 1 * *", None, "and", "is for an expression with a day of the month and a day"),
            ("0 3 * * MON", None, "and", r"has a \*; omit days"),
            (None, HOUR, "and", "days is for a cron expression"),
            ("0 3 1 * MON", None, "both", "days is 'both'; give 'or' or 'and'"),
            ("0 3 31 2 MON", None, "and", "names no day of the calendar|takes 1 to the last day"),
        ],
    )
    def test_where_it_means_nothing_it_is_refused(
        self, cron: str | None, every: timedelta | None, days: str, words: str
    ) -> None:
        with pytest.raises(OptionError, match=words):
            checked_rule("", cron, every, "UTC", days)

    def test_it_is_stored_and_changed(self, queue: PgQueue) -> None:
        task = queue.task(name="t")(lambda: None)
        with queue.session() as session, session.begin():
            queue.schedules.add(session, task, "0 3 1-7 * TUE", name="s", days="and")
            [state] = queue.schedules.list(session)
            assert all(tick.day <= 7 and tick.weekday() == 1 for tick in state.next_runs(9))

            queue.schedules.change(session, "s", timezone="Asia/Tokyo")
            [state] = queue.schedules.list(session)
            assert state.days == "and"

            queue.schedules.change(session, "s", days="or")
            [state] = queue.schedules.list(session)
            assert {tick.astimezone(UTC).weekday() for tick in state.next_runs(9)} != {0}

    def test_a_worker_writes_it(self, queue: PgQueue, engine: Engine) -> None:
        queue.schedule("0 3 1-7 * TUE", days="and")(queue.task(name="t")(lambda: None))

        with engine.begin() as connection:
            queue.schedules.synchronise(connection)
            assert queue.schedules.differing(connection) == []

        with Session(engine) as session:
            assert session.scalars(select(Schedule.days)).one() == "and"


class TestMadeArguments:
    @pytest.fixture
    def asked(self, queue: PgQueue) -> list[datetime]:
        asked: list[datetime] = []

        def make(tick: datetime) -> dict[str, Any] | None:
            asked.append(tick)
            return None if tick.hour == 1 else {"day": tick.date()}

        @queue.schedule("0 * * * *", timezone="Asia/Tokyo", args=make, catch_up=24)
        @queue.task(name="t")
        def report(day: date) -> None: ...

        with queue.engine.begin() as connection:
            queue.schedules.synchronise(connection)
        return asked

    def fire(self, queue: PgQueue, at: str) -> None:
        """Fire the ticks of the last hours, the first of which was at this time."""
        with queue.engine.begin() as connection:
            connection.execute(text(f"UPDATE pgqueue.schedules SET next_at = {at}"))
        fire(queue)

    def test_a_function_of_the_tick_makes_them_or_wants_no_job(
        self, queue: PgQueue, asked: list[datetime]
    ) -> None:
        self.fire(queue, "date_trunc('hour', clock_timestamp()) - interval '23 hours'")

        assert len(asked) == 24
        assert {tick.utcoffset() for tick in asked} == {timedelta(hours=9)}
        made = [job.args for job in jobs(queue)]
        assert made == [{"day": tick.date().isoformat()} for tick in asked if tick.hour != 1]

    def test_a_trigger_makes_them_of_now(self, queue: PgQueue) -> None:
        @queue.schedule("0 0 1 1 *", args=lambda now: (now,))
        @queue.task(name="t")
        def report(now: datetime) -> None: ...

        began = datetime.now(UTC)
        with queue.session() as session, session.begin():
            queue.schedules.synchronise(session.connection())
            queue.schedules.trigger(session, "t")

        [job] = jobs(queue)
        assert abs(datetime.fromisoformat(job.args["now"]) - began) < timedelta(minutes=5)

    def test_a_worker_without_the_function_leaves_the_tick_due(
        self, queue: PgQueue, asked: list[datetime], caplog: pytest.LogCaptureFixture
    ) -> None:
        other = PgQueue(queue.engine)
        other.task(name="t")(lambda day: None)

        self.fire(other, "clock_timestamp() - interval '1 hour'")

        assert jobs(other) == []
        assert "made by a function, which this version of the application does" in caplog.text
        with other.session() as session, pytest.raises(OptionError, match="made by a function"):
            other.schedules.trigger(session, "t")

    def test_new_arguments_replace_the_function(
        self, queue: PgQueue, asked: list[datetime]
    ) -> None:
        with queue.session() as session, session.begin():
            queue.schedules.change(session, "t", args=(date(2030, 1, 1),))
            queue.schedules.trigger(session, "t")

        assert asked == []
        assert jobs(queue)[0].args == {"day": "2030-01-01"}

    def test_a_schedule_of_the_table_takes_no_function(self, queue: PgQueue) -> None:
        task = queue.task(name="t")(lambda: None)
        args: Any = lambda tick: ()  # noqa: E731  # a wrong value
        with queue.session() as session, session.begin():
            with pytest.raises(OptionError, match="args is a function, which the table cannot"):
                queue.schedules.add(session, task, "@daily", name="s", args=args)
            queue.schedules.add(session, task, "@daily", name="s")
            with pytest.raises(ArgumentsError, match="give a tuple of positional"):
                queue.schedules.change(session, "s", args=args)


class TestAtOnce:
    def deploy(self, engine: Engine, cron: str, *, at_once: bool = True) -> list[datetime]:
        """Start an application with this rule; returns the last tick that was fired."""
        queue = PgQueue(engine)
        queue.schedule(cron, at_once=at_once)(queue.task(name="t")(lambda: None))
        with queue.session() as session:
            [view] = queue.views.schedules(session)
        with queue.engine.begin() as connection:
            queue.schedules.synchronise(connection)
        fire(queue)
        with queue.session() as session:
            ticks = [tick for tick in session.scalars(select(Schedule.last_tick_at)) if tick]
        if ticks and not view.is_written:  # it was shown as it came
            assert view.state.next_at is not None
            assert view.state.next_at <= ticks[0]
        return ticks

    def test_the_first_tick_is_when_the_code_is_written_first(self, engine: Engine) -> None:
        began = datetime.now(UTC)
        [first] = self.deploy(engine, "0 0 1 1 *")

        assert abs(first - began) < timedelta(minutes=5)
        assert self.deploy(engine, "0 0 1 1 *") == self.deploy(engine, "0 0 2 1 *") == [first]
        assert len(jobs(PgQueue(engine))) == 1

    def test_a_row_that_is_there_is_left_alone(self, engine: Engine) -> None:
        assert self.deploy(engine, "@yearly", at_once=False) == []
        queue = PgQueue(engine)
        with queue.session() as session, session.begin():
            queue.schedules.change(session, "t", every=DAY)

        assert self.deploy(engine, "@yearly") == []
        with queue.session() as session:
            assert session.scalars(select(Schedule.every)).one() == DAY

    def test_of_the_table_too(self, queue: PgQueue) -> None:
        task = queue.task(name="t")(lambda: None)
        with queue.session() as session, session.begin():
            with pytest.raises(OptionError, match="at_once is 'yes'; give True or False"):
                queue.schedules.add(session, task, "@yearly", name="s", at_once="yes")  # type: ignore[arg-type]
            queue.schedules.add(session, task, "@yearly", name="s", at_once=True)
        fire(queue)

        assert len(jobs(queue)) == 1


class TestBackfill:
    @pytest.fixture
    def queue(self, engine: Engine) -> PgQueue:
        queue = PgQueue(engine)
        task = queue.task(name="t")(lambda n: None)
        with queue.session() as session, session.begin():
            queue.schedules.add(session, task, every=DAY, name="s", args=(7,), priority=1)
        return queue

    def backfilled(self, queue: PgQueue, *times: datetime) -> list[int]:
        with queue.session() as session, session.begin():
            return list(queue.schedules.backfill(session, "s", *times))

    def test_each_tick_of_a_time_gets_a_job(self, queue: PgQueue) -> None:
        since = datetime(2020, 1, 1, tzinfo=UTC)
        with queue.session() as session:
            [before] = queue.schedules.list(session)

        ids = self.backfilled(queue, since, since + 3 * DAY)

        found = jobs(queue)
        assert [job.id for job in found] == ids
        assert [job.meta for job in found] == [
            {"schedule": {"name": "s", "tick": (since + n * DAY).isoformat()}} for n in range(3)
        ]
        assert [(job.args, job.priority) for job in found] == [({"n": 7}, 1)] * 3
        with queue.session() as session:
            [after] = queue.schedules.list(session)
        assert (after.next_at, after.last_tick_at) == (before.next_at, before.last_tick_at)
        assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 3}

    def test_without_an_end_it_is_up_to_now(self, queue: PgQueue) -> None:
        assert len(self.backfilled(queue, datetime.now(UTC) - 10 * DAY)) == 10

    @pytest.mark.parametrize(
        ("times", "words"),
        [
            ([datetime(2020, 1, 1)], "since is .* time zone"),
            ([datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)], "yet to come"),
            ([datetime(2000, 1, 1, tzinfo=UTC), datetime(2029, 1, 1, tzinfo=UTC)], "yet to come"),
        ],
    )
    def test_a_wrong_time_is_refused(
        self, queue: PgQueue, times: list[datetime], words: str
    ) -> None:
        with pytest.raises(OptionError, match=f"backfill of schedule s: .*{words}"):
            self.backfilled(queue, *times)

    def test_too_many_ticks_are_refused(self, queue: PgQueue) -> None:
        with queue.session() as session, session.begin():
            queue.schedules.change(session, "s", every=HOUR)

        with pytest.raises(OptionError, match="more than 10,000 ticks, up to 2001-02-20"):
            self.backfilled(queue, datetime(2000, 1, 1, tzinfo=UTC))
        assert jobs(queue) == []

    def test_an_unknown_schedule_is_told(self, queue: PgQueue) -> None:
        with queue.session() as session, pytest.raises(ScheduleNotFound):
            queue.schedules.backfill(session, "x", datetime(2020, 1, 1, tzinfo=UTC))

    def test_the_command_enqueues_and_logs_it(self, queue: PgQueue, engine: Engine) -> None:
        times = ("--since", "2020-01-01T00:00Z", "--until", "2020-01-03T00:00Z")

        ended = command(queue, "schedules", "backfill", "s", *times, "--reason", "lost")
        wrong = command(queue, "schedules", "backfill", "s", "--since", "2220-01-01T00:00Z")

        assert (ended.stdout, wrong.returncode) == ("s: 2 jobs enqueued\n", 2)
        assert_one_line(wrong, "since is 2220-01-01 00:00:00+00:00, which is yet to come")
        with Session(engine) as session:
            action = session.scalars(select(OperatorAction).order_by(OperatorAction.id)).first()
        assert action is not None
        assert (action.action, action.target) == ("backfill_schedule", {"schedule": "s"})
        assert (action.jobs, action.reason) == (2, "lost")


def test_schedules_of_the_code_are_shown_before_a_worker_has_written_them(queue: PgQueue) -> None:
    queue.schedule("@daily", timezone="Asia/Tokyo")(queue.task(name="new")(lambda: None))

    said = command(queue, "schedules").stdout
    with queue.session() as session:
        [view] = queue.views.schedules(session)

    assert re.search(r"new +new +0 0 \* \* \* Asia/Tokyo", said)
    assert "of the code; the next worker that starts writes it" in said
    assert (view.is_written, len(view.next_runs)) == (False, 3)
    page = Visitor(queue).get("/schedules").text
    assert "the next worker that starts writes it" in page
    assert "Run now" not in page.partition("<table")[2].partition("</table")[0]

    with queue.engine.begin() as connection:
        queue.schedules.synchronise(connection)
    assert "of the code" not in command(queue, "schedules").stdout
    assert "Run now" in Visitor(queue).get("/schedules").text
