"""What a database administrator sets for a database changes neither what is read nor what runs."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, NullPool, create_engine, event, make_url, text
from sqlalchemy.orm import Session

from pgqueue import Limit, PgQueue, Unique, Worker
from pgqueue.cli import main
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import JANITOR
from pgqueue.worker.duties.prune import PruneRound, RoundState

HOSTILE = {
    "TimeZone": "America/St_Johns",
    "extra_float_digits": "-15",
    "bytea_output": "escape",
    "standard_conforming_strings": "off",
    "backslash_quote": "off",
    "escape_string_warning": "on",
    "transform_null_equals": "on",
    "array_nulls": "off",
    "quote_all_identifiers": "on",
    "xmlbinary": "hex",
    "xmloption": "document",
    "client_encoding": "LATIN1",
    "lc_messages": "C.UTF-8",
    "lc_monetary": "C.UTF-8",
    "lc_numeric": "C.UTF-8",
    "lc_time": "C.UTF-8",
    "timezone_abbreviations": "India",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "row_security": "off",
    "search_path": "nowhere",
    "jit": "on",
    "jit_above_cost": "0",
    "plan_cache_mode": "force_custom_plan",
    "constraint_exclusion": "on",
    "check_function_bodies": "off",
    "default_text_search_config": "simple",
    "synchronize_seqscans": "off",
    "stats_fetch_consistency": "snapshot",
}
"""Other values than PostgreSQL's, of settings that every role may change and that decide how values
are written or read."""

DRIVERS = {
    "psycopg": ("German", "iso_8601"),
    "psycopg, listened to": ("SQL, DMY", "sql_standard"),
    "psycopg2": ("Postgres, YMD", "postgres_verbose"),
}

COMMANDS = ("status", "doctor", "jobs", "schedules", "limits", "workers")


@pytest.fixture(params=DRIVERS.items(), ids=lambda driver: driver[0])
def hostile_engine(request: pytest.FixtureRequest, database_url: str) -> Iterator[Engine]:
    name, (date_style, interval_style) = request.param
    given = {**HOSTILE, "DateStyle": date_style, "IntervalStyle": interval_style}
    url = make_url(database_url)
    administrator = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with administrator.connect() as connection:
        known = set(connection.scalars(text("SELECT name FROM pg_catalog.pg_settings")))
        for setting in given.keys() & known:
            words = f"ALTER DATABASE {url.database} SET {setting} = '{given[setting]}'"
            connection.execute(text(words))
    driver, _, is_listened_to = name.partition(", ")
    engine = create_engine(url.set(drivername=f"postgresql+{driver}"))
    if is_listened_to:  # SQLAlchemy then executes each statement
        event.listen(engine, "before_cursor_execute", lambda *_: None)
    yield engine
    engine.dispose()


def test_hostile_settings_of_the_database_change_nothing(hostile_engine: Engine) -> None:
    begun = datetime.now(UTC) - timedelta(minutes=5)
    ran: list[str] = []
    limit = Limit(5, per=timedelta(hours=1), burst=5)
    queue = PgQueue(hostile_engine, queue_limits={"mail": limit}, keep=timedelta(0))

    @queue.task(name="note", queue="mail", fair_by="word")
    def note(word: str) -> None:
        ran.append(word)

    @queue.task(name="pay")
    def pay(session: Session, word: str) -> None:
        session.execute(text("SELECT 1"))
        ran.append(word)

    @queue.task(name="latest", unique_key=lambda word: word)
    def latest(word: str) -> None:
        ran.append(word)

    @queue.task(name="done")
    def done(batch_id: int) -> None:
        ran.append("batch")

    def is_recent(moment: datetime | None) -> bool:
        return moment is not None and begun < moment < begun + timedelta(hours=1)

    with queue.session() as session, session.begin():
        enqueued = note.enqueue(session, "enqueued")
        added = pay.job("added \xfc")
        session.add(added)
        session.flush()
        unique = latest.enqueue(session, "unique")
        session.expunge(unique)
        again = latest.enqueue(session, "unique")
        hour = timedelta(hours=1)
        postpone = latest.options(unique=Unique(key="unique", on_conflict="postpone"), delay=hour)
        postponed = postpone.enqueue(session, "unique")
        assert (again.id, postponed.id) == (unique.id, unique.id)
        assert postponed.run_at > begun + hour
        assert all(is_recent(job.created_at) for job in (enqueued, added, unique, again))
        queue.schedules.add(session, pay, every=hour, name="hourly", args=("tick",))
        queue.schedules.change(session, "hourly", every=2 * hour)
        with queue.batch(session, on_success=done) as batch:
            later = note.options(delay=hour).enqueue(session, "later")
        ids = unique.id, later.id
    unique_id, later_id = ids
    with queue.session() as session, session.begin():
        assert queue.change(session, later_id, delay=2 * hour)
        assert queue.run_now(session, later_id)
        assert queue.run_now(session, unique_id)
        [schedule] = queue.schedules.list(session)
        assert (schedule.every, is_recent(schedule.read_at)) == (2 * hour, True)
        assert queue.get_batch(session, batch.id).outcome is None
    pay.delay("delayed")
    assert_commands_answer(hostile_engine, ["jobs"], ["jobs", str(later_id)], ["limits"])

    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 6}

    assert sorted(ran) == ["added \xfc", "batch", "delayed", "enqueued", "later", "unique"]
    with queue.session() as session, session.begin():
        assert is_recent(queue.get_batch(session, batch.id).ended_at)
        queue.pause(session, "mail")
        queue.pause_task(session, "note")
        queue.schedules.pause(session, "hourly")
        views = queue.views
        [mail] = views.queues(session, ["mail"]).queues
        [(_, task_at)] = views.paused_tasks(session, limit=9)
        [(_, schedule_at)] = views.paused_schedules(session, limit=9)
        [task_view] = views.tasks(session, timedelta(hours=1), "note")
        times = (mail.paused_at, task_at, schedule_at, task_view.paused_at)
        assert all(map(is_recent, times))
        assert queue.check(session) == []
    assert_commands_answer(hostile_engine, *([command] for command in COMMANDS))
    pruning = PruneRound(queue.retention)
    with own_connection(queue.engine, JANITOR, isolation_level="READ COMMITTED") as connection:
        while pruning.step(connection) is RoundState.MORE:
            pass
    with queue.session() as session:
        assert queue.counts(session) == []


def assert_commands_answer(engine: Engine, *commands: list[str]) -> None:
    url = engine.url.render_as_string(hide_password=False)
    for words in commands:
        ended = CliRunner().invoke(main, ["--url", url, *words, "--json"])
        # The doctor finds this database badly set, and ends with 1.
        assert ended.exit_code == 0 or words == ["doctor"], (words, ended.output, ended.exception)
        assert json.loads(ended.stdout), words
