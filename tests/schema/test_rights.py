"""Five roles on a real server: each does the whole of its work, and nothing else."""

import asyncio
import io
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import URL, Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from visitor import Visitor

from chaos.interleavings.logical_workers import (
    LogicalWorker,
    committed,
    declare_dead,
    execute,
    rescue,
    violations,
    worker_settings,
)
from pgqueue import Cancel, Change, Limit, PgQueue, Retry, Snooze, Worker
from pgqueue.dashboard.pages import ROUTES
from pgqueue.errors import OptionError
from pgqueue.operations import Operator, Selection
from pgqueue.operations.actions import ACTIONS
from pgqueue.repository.batches import Batches
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.error_groups import ErrorGroups
from pgqueue.repository.failures import FailedGroups
from pgqueue.repository.listing import Listing
from pgqueue.repository.operator_actions import OperatorActions
from pgqueue.repository.queue_minutes import QueueMinutes
from pgqueue.repository.tables import array_of
from pgqueue.repository.task_minutes import TaskMinutes
from pgqueue.schema import grant, revoke, upgrade_database, verify
from pgqueue.testing.databases import fresh_database
from pgqueue.worker.duties.ticks import Ticks

HOUR = timedelta(hours=1)
PURPOSES = ("worker", "enqueue", "dashboard", "migrator", "owner")
INSUFFICIENT_PRIVILEGE = "42501"

tasks = PgQueue()


@tasks.task(name="tests.task")
def claimed_by_hand() -> None: ...


@tasks.task
def succeed(n: int) -> int:
    return n


@tasks.task(keep=timedelta(0))
def leave_nothing() -> None: ...


@tasks.task(max_attempts=2, retry=Retry.constant(timedelta(0)))
def fail() -> None:
    raise ValueError("planned")


@tasks.task(unique_key=lambda n: f"once {n}")
def once(n: int) -> None: ...


@tasks.task
def follow_up(session: Session) -> None:
    succeed.enqueue(session, 1)
    session.add(once.job(99))
    waiting = succeed.options(delay=timedelta(hours=1)).enqueue(session, 2)
    tasks.cancel(session, waiting.id)
    tasks.requeue(session, waiting.id)
    tasks.cancel(session, waiting.id)


@tasks.task(limit=Limit(1, by="n"))
def one_at_a_time(n: int) -> None: ...


@tasks.task(limit=(Limit(2, name="alone"), Limit(60, per=timedelta(hours=1), burst=9, name="rate")))
def alone(n: int) -> None: ...


@tasks.task
def give_up() -> Cancel:
    return Cancel("no need")


@tasks.task
def sleep_on() -> Snooze:
    return Snooze(timedelta(hours=1))


@contextmanager
def new_roles(engine: Engine) -> Iterator[dict[str, str]]:
    names = {purpose: f"{purpose}_{uuid.uuid4().hex[:10]}" for purpose in PURPOSES}
    with engine.begin() as connection:
        for purpose, name in names.items():
            login = "NOLOGIN" if purpose == "owner" else "LOGIN PASSWORD 'x'"
            connection.execute(text(f"CREATE ROLE {name} {login}"))
    yield names
    with engine.begin() as connection:
        for name in names.values():
            connection.execute(text(f"REASSIGN OWNED BY {name} TO CURRENT_USER"))
            connection.execute(text(f"DROP OWNED BY {name}"))
        for name in names.values():
            connection.execute(text(f"DROP ROLE {name}"))


class Place:
    """A database, its five roles, and an engine for each."""

    def __init__(self, admin: Engine, names: dict[str, str]) -> None:
        self.admin = admin
        self.names = names
        self.engines: dict[str, Engine] = {}

    def url(self, purpose: str) -> URL:
        return make_url(self.admin.url).set(username=self.names[purpose], password="x")

    def engine(self, purpose: str) -> Engine:
        if purpose not in self.engines:
            self.engines[purpose] = create_engine(self.url(purpose))
        return self.engines[purpose]

    def run(self, purpose: str, *statements: str) -> None:
        with self.engine(purpose).connect() as connection:
            for statement in statements:
                connection.execute(text(statement))
            connection.rollback()

    @contextmanager
    def session(self, purpose: str) -> Iterator[Session]:
        """The queue belongs to this role from here on; its transaction is committed at the end."""
        tasks.bind(self.engine(purpose))
        with tasks.session() as session, session.begin():
            yield session

    def grant(self, **names: str) -> None:
        committed(self.admin, lambda connection: grant(**names, connection=connection))

    def revoke(self, **names: str) -> None:
        committed(self.admin, lambda connection: revoke(**names, connection=connection))

    def outcomes(self) -> dict[str, int]:
        count = "SELECT coalesce(outcome, 'unfinished'), count(*) FROM pgqueue.jobs GROUP BY 1"
        with self.admin.connect() as connection:
            return dict(map(tuple, connection.execute(text(count))))


@pytest.fixture(scope="module")
def place(server_url: str, template_url: str) -> Iterator[Place]:
    with fresh_database(server_url, template_url=template_url) as url:
        admin = create_engine(url)
        with new_roles(admin) as names:
            place = Place(admin, names)
            place.grant(**names)
            yield place
            for engine in place.engines.values():
                engine.dispose()
        admin.dispose()


@pytest.fixture
def queue(place: Place) -> Iterator[PgQueue]:
    """The tasks on a database that holds no jobs."""
    yield tasks
    with place.admin.begin() as connection:
        connection.execute(text("TRUNCATE pgqueue.jobs, pgqueue.message_queue, pgqueue.leases"))
        connection.execute(text("TRUNCATE pgqueue.dead_letters, pgqueue.workers"))
        connection.execute(text("TRUNCATE pgqueue.waiting_messages, pgqueue.limit_places"))


class TestEnqueue:
    def test_by_every_door(self, place: Place, queue: PgQueue) -> None:
        queue.bind(place.engine("enqueue"))
        with queue.session() as session:
            session.add_all([succeed.job(1), once.job(1)])
            first = once.enqueue(session, 2)
            ids = [first.id, once.enqueue(session, 2).id]
            session.commit()
            again = once.enqueue(session, 2)
            assert again.task == once.name
            ids += [again.id, *once.enqueue_many(session, [(2,), (2,)])]
            succeed.enqueue_many(session, [(2,), (3,)])
            succeed.options(delay=timedelta(1), priority=1).enqueue(session, 4)
            session.commit()
        ids.append(once.delay(2).id)
        succeed.delay(5)
        self.enqueue_under_limits(queue)
        asyncio.run(self.enqueue_async(place.url("enqueue")))

        assert len(set(ids)) == 1
        assert place.outcomes() == {"unfinished": 12}
        assert violations(place.admin) == []

    def enqueue_under_limits(self, queue: PgQueue) -> None:
        one_at_a_time.delay(1)
        with queue.session() as session:
            session.add(one_at_a_time.job(1))
            one_at_a_time.enqueue_many(session, [(1,), (2,)])
            session.commit()

    async def enqueue_async(self, url: URL) -> None:
        engine = create_async_engine(url)
        async with AsyncSession(engine) as session:
            await succeed.enqueue_async(session, 6)
            await once.enqueue_async(session, 2)
            await session.commit()
        await engine.dispose()


class TestWorker:
    def test_runs_jobs_of_every_end(self, place: Place, queue: PgQueue) -> None:
        queue.bind(place.engine("worker"))
        for task in (fail, follow_up, give_up, leave_nothing, sleep_on):
            task.delay()
        with queue.session() as session:
            succeed.enqueue_many(session, [(n,) for n in range(20)])
            one_at_a_time.enqueue_many(session, [(n % 2,) for n in range(10)])
            session.commit()

        Worker(queue, concurrency=2).run_until_empty(timeout=60)

        assert place.outcomes() == {"succeeded": 33, "failed": 1, "cancelled": 2, "unfinished": 1}
        assert violations(place.admin) == []
        with place.engine("worker").connect() as connection:
            ended = {one.task: one.ended for one in TaskMinutes(connection).since(HOUR)}
            assert ended["test_rights.fail"] == 2
            TaskMinutes(connection).prune()
            ErrorGroups(connection).prune()
            OperatorActions(connection).prune()
            ErrorGroups(connection).note_deploy("", "v1")

    def test_rescues_what_the_dead_have_left(self, place: Place, queue: PgQueue) -> None:
        queue.bind(place.engine("worker"))
        engine = worker_settings(place.url("worker"))
        job_id = claimed_by_hand.delay().id
        dead = LogicalWorker(engine)
        assert [claimed.job_id for claimed in dead.claim()] == [job_id]
        dead.close()
        declare_dead(engine, dead)

        assert rescue(engine) == {job_id: None}


class TestDashboard:
    def test_looks_checks_and_changes(self, place: Place, queue: PgQueue) -> None:
        queue.bind(place.engine("worker"))
        ids = [succeed.delay(1).id, fail.delay().id]
        Worker(queue, concurrency=1).run_until_empty(timeout=60)
        ids += [once.delay(1).id, once.delay(2).id]
        running = claimed_by_hand.options(queue="slow").delay().id
        worker = LogicalWorker(worker_settings(place.url("worker")))
        assert worker.claim(queue="slow")

        queue.bind(place.engine("dashboard"))
        with queue.session() as session:
            changes = [queue.cancel(session, id, kill=True) for id in (ids[0], ids[2])]
            changes += [queue.cancel(session, running)]
            changes += [queue.requeue(session, id) for id in (ids[1], ids[2])]
            queue.pause(session, "mail")
            queue.pause_task(session, "tests.task")
            queue.resume_task(session, "tests.task")
            queue.resume(session, "mail")
            session.commit()
            assert queue.check(session) == []
            assert {count.jobs for count in queue.counts(session)} == {1, 3}
        worker.close()

        assert changes == [
            Change.UNCHANGED,
            Change.CANCELLED,
            Change.CANCEL_REQUESTED,
            Change.REQUEUED,
            Change.REQUEUED,
        ]
        place.run("dashboard", "SELECT * FROM pgqueue.job_overview", "TABLE pgqueue.deploys")
        with queue.session() as session:
            TaskMinutes(session).since(HOUR)
            ErrorGroups(session).newest(limit=1)
            FailedGroups(session).newest(JobFilter(tag="a"), limit=1, is_limited=True)
            ErrorGroups(session).mute(1, "a", HOUR)
        self.act_on_many(place, queue)
        self.change_limits(place, queue)
        place.run("dashboard", "SELECT * FROM pgqueue.invariant_violations")

    def test_shows_its_pages_and_acts_on_them(self, place: Place, queue: PgQueue) -> None:
        queue.bind(place.engine("worker"))
        ids = [fail.delay().id, one_at_a_time.delay(1).id]
        Worker(queue, concurrency=1).run_until_empty(timeout=60)
        committed(place.engine("worker"), lambda connection: QueueMinutes(connection).count())

        queue.bind(place.engine("dashboard"))
        visitor = Visitor(queue)
        for route in ROUTES:
            if route.method == "GET" and "<" not in route.rule:
                # 400: a page that needs a parameter.
                assert visitor.get(route.rule).status_code in (200, 400), route.rule
        for page in (f"/jobs/{ids[0]}", f"/tasks/{fail.name}"):
            assert visitor.get(page).status_code == 200, page
        by_argument = visitor.text(f"/jobs?q=task:{fail.name}+arg.number:1", status=403)
        assert "the database role of the dashboard does not have the right" in by_argument
        changes: dict[str, dict[str, str]] = {
            "/queues/pause": {"queue": "mail"},
            "/queues/resume": {"queue": "mail"},
            "/queues/limit": {"limit": "alone", "capacity": "2"},
            "/tasks/pause": {"task": fail.name},
            "/tasks/resume": {"task": fail.name},
        }
        for address, form in changes.items():
            assert visitor.post(address, form).status_code == 303, address

    def act_on_many(self, place: Place, queue: PgQueue) -> None:
        ada = Operator(queue, "ada", begin=lambda: place.session("dashboard"))
        every = Selection(after=0)
        with place.session("dashboard") as session:
            every.preview(session, ACTIONS["requeue"])
        cancelled = ada.cancel(every)
        requeued = ada.requeue(Selection(cancelled.entry.first_ids), spread=HOUR)
        assert (requeued.changed, requeued.skipped) == (cancelled.changed - 1, 1), "one runs"
        assert ada.run_now(every).changed > 0
        assert ada.change(every, priority=7).changed > 0
        with place.session("dashboard") as session:
            queue.cancel_where(session, queue="default")

    def change_limits(self, place: Place, queue: PgQueue) -> None:
        queue.bind(place.engine("enqueue"))
        ids = [one_at_a_time.options(delay=timedelta(hours=1)).delay(1).id for _ in range(2)]
        queue.bind(place.engine("dashboard"))
        with queue.session() as session:
            assert queue.cancel(session, ids[1]) is Change.CANCELLED
            assert queue.requeue(session, ids[1]) is Change.REQUEUED
            queue.set_limit(session, "test_rights.one_at_a_time:n", 3)
            queue.set_limit(session, "test_rights.one_at_a_time:n", 0, key=7)
            queue.set_limit(session, "test_rights.one_at_a_time:n", None, key=7)
            session.commit()
            [limit] = [one for one in queue.limits(session) if one.name.endswith(":n")]
            assert (limit.capacity, limit.waiting) == (3, 2)
            assert queue.check(session) == []


class TestLimits:
    def test_each_role_does_its_part(self, place: Place, queue: PgQueue) -> None:
        with place.session("enqueue") as session:
            session.add(alone.job(1))
            alone.enqueue_many(session, [(1,), (2,)])
            first = alone.options(delay=HOUR).enqueue(session, 1).id
            second = alone.options(delay=HOUR).enqueue(session, 1).id
            third = succeed.options(delay=HOUR).enqueue(session, 1).id

        with place.session("dashboard") as session:
            queue.set_limit(session, "alone", 1)  # which no worker has declared
            assert not queue.quiet(session, uuid.uuid4())
            assert [queue.run_now(session, id) for id in (first, third)] == [Change.DUE_NOW] * 2
            for id in (second, third):
                assert queue.change(session, id, priority=1, delay=timedelta(0)) is Change.CHANGED
            assert queue.cancel(session, second) is Change.CANCELLED
            assert queue.requeue(session, second) is Change.REQUEUED
            queue.set_limit(session, "rate", 30)
            waiting = {one.name: one.waiting for one in queue.limits(session)}
            assert (waiting["alone"], waiting["rate"]) == (5, 5)

        queue.bind(place.engine("worker"))
        assert Worker(queue).run_until_empty(timeout=60)["succeeded"] == 6
        with place.session("dashboard") as session:
            assert [use.key for use in Listing(session).job(first).limits] == ["alone", "rate"]
        assert violations(place.admin) == []


class TestBatches:
    def test_an_enqueuer_creates_and_extends_them_and_a_worker_ends_them(
        self, place: Place, queue: PgQueue
    ) -> None:
        with place.session("enqueue") as session:
            with queue.batch(session, "mine", on_success=succeed) as batch:
                succeed.enqueue(session, 1)
            with queue.extend_batch(session, batch.id):
                succeed.enqueue_many(session, [(2,), (3,)])
        with place.session("dashboard") as session:
            assert queue.get_batch(session, batch.id).total == 3

        queue.bind(place.engine("worker"))
        assert Worker(queue).run_until_empty(timeout=60)["succeeded"] == 4
        with place.engine("worker").connect() as connection:
            connection.execute(text("UPDATE pgqueue.batches SET ended_at = now() - interval '9y'"))
            assert Batches(connection).prune(batch.id, queue.retention, 100) == 4
            connection.rollback()

        with place.session("dashboard") as session:
            [state] = queue.batches(session)
        assert (state.outcome, state.total) == ("succeeded", 3)


class TestSchedules:
    def test_an_enqueuer_manages_them_a_worker_fires_them_and_a_dashboard_pauses_them(
        self, place: Place, queue: PgQueue
    ) -> None:
        with place.session("enqueue") as session:
            for name in ("kept", "gone"):
                queue.schedules.add(session, succeed, every=HOUR, name=name, args=(1,))
            queue.schedules.change(session, "kept", "0 3 * * *", args=(2,), priority=1)
            queue.schedules.trigger(session, "kept")
            queue.schedules.remove(session, "gone")
        with place.session("dashboard") as session:
            queue.schedules.pause(session, "kept")
            queue.schedules.resume(session, "kept")
            [state] = queue.schedules.list(session)
        execute(place.admin, "UPDATE pgqueue.schedules SET next_at = now() - interval '1 hour'")
        with place.engine("worker").connect() as connection:
            Ticks(queue.tasks, array_of(queue.tasks)).fire(connection)
            with connection.begin():
                queue.schedules.synchronise(connection)

        assert state.paused_at is None
        assert place.outcomes() == {"unfinished": 2}
        execute(place.admin, "TRUNCATE pgqueue.schedules")


class TestMigrator:
    def test_upgrades_and_grants_as_the_owner(self, server_url: str) -> None:
        with fresh_database(server_url) as url:
            admin = create_engine(url)
            with new_roles(admin) as names:
                place = Place(admin, names)
                with admin.begin() as connection:
                    connection.execute(
                        text(f"CREATE SCHEMA pgqueue AUTHORIZATION {names['owner']}")
                    )
                    connection.execute(text(f"GRANT {names['owner']} TO {names['migrator']}"))
                    # To be owner of a schema, PostgreSQL asks for the right to create one.
                    create = f"GRANT CREATE ON DATABASE {admin.url.database} TO {names['owner']}"
                    connection.execute(text(create))

                upgrade_database(place.engine("migrator"))
                with place.engine("migrator").begin() as connection:
                    grant(**names, connection=connection)
                    grant(**names, connection=connection)

                with place.engine("worker").connect() as connection:
                    verify(connection)
                assert owners(admin) == {names["owner"]}
                for engine in place.engines.values():
                    engine.dispose()
            admin.dispose()


def owners(engine: Engine) -> set[str]:
    statement = """
        SELECT pg_get_userbyid(relowner) FROM pg_class
        WHERE relnamespace = 'pgqueue'::regnamespace AND relkind IN ('r', 'v', 'S')
        UNION SELECT pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = 'pgqueue'
    """
    with engine.connect() as connection:
        return set(connection.scalars(text(statement)))


NOBODY = [
    "CREATE TABLE pgqueue.mine (id int)",
    "CREATE VIEW pgqueue.mine AS SELECT 1",
    "CREATE FUNCTION pgqueue.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "ALTER TABLE pgqueue.jobs ADD COLUMN mine int",
    "ALTER TABLE pgqueue.jobs DISABLE TRIGGER ALL",
    "CREATE INDEX ON pgqueue.jobs (task)",
    "DROP TABLE pgqueue.leases",
    "DROP VIEW pgqueue.invariant_violations",
    "DROP SCHEMA pgqueue CASCADE",
    "TRUNCATE pgqueue.jobs",
    "TRUNCATE pgqueue.leases",
    "UPDATE pgqueue.message_queue SET target_id = 1",
    "UPDATE pgqueue.schema_version SET oldest_code = 99",
    "DELETE FROM pgqueue.schema_version",
    "DELETE FROM pgqueue.queues",
    "CREATE RULE spy AS ON INSERT TO pgqueue.jobs DO ALSO NOTHING",
]
NOT_ENQUEUE = [
    "SELECT message FROM pgqueue.error_groups",
    "SELECT args FROM pgqueue.jobs",
    "SELECT * FROM pgqueue.jobs",
    "SELECT jobs FROM pgqueue.jobs",
    "SELECT result FROM pgqueue.jobs",
    "SELECT last_error FROM pgqueue.jobs",
    "SELECT meta FROM pgqueue.jobs",
    "SELECT id FROM pgqueue.jobs WHERE args ->> 'token' = 'x'",
    "INSERT INTO pgqueue.jobs (task) VALUES ('t') RETURNING args",
    "UPDATE pgqueue.jobs SET args = '{}'",
    "UPDATE pgqueue.jobs SET outcome = 'cancelled', finished_at = now()",
    "UPDATE pgqueue.jobs SET held_unique_key = args::text",
    "SELECT * FROM pgqueue.message_queue",
    "DELETE FROM pgqueue.message_queue",
    "SELECT * FROM pgqueue.leases",
    "SELECT * FROM pgqueue.job_attempts",
    "SELECT * FROM pgqueue.dead_letters",
    "SELECT * FROM pgqueue.workers",
    "SELECT * FROM pgqueue.job_overview",
    "SELECT * FROM pgqueue.invariant_violations",
    "UPDATE pgqueue.workers SET dead_at = now()",
    "INSERT INTO pgqueue.queues (name, paused_at) VALUES ('mail', now())",
    "SELECT * FROM pgqueue.waiting_messages",
    "DELETE FROM pgqueue.waiting_messages",
    "INSERT INTO pgqueue.limits (name, declared) VALUES ('bank', 9)",
    "DELETE FROM pgqueue.limit_places",
    "SELECT * FROM pgqueue.batches",
    "UPDATE pgqueue.batches SET ended_at = now()",
    "DELETE FROM pgqueue.batch_jobs",
]
NOT_WORKER = [
    "UPDATE pgqueue.deploys SET version = ''",
    "DELETE FROM pgqueue.schedules",
    "UPDATE pgqueue.queues SET paused_at = now()",
    "UPDATE pgqueue.job_attempts SET error = ''",
    "UPDATE pgqueue.dead_letters SET outcome = 'failed'",
]
NOT_DASHBOARD = [
    "UPDATE pgqueue.task_minutes SET failed = 0",
    "DELETE FROM pgqueue.error_groups",
    "SELECT args FROM pgqueue.schedules",
    "UPDATE pgqueue.batches SET on_success = NULL",
    "UPDATE pgqueue.schedules SET args = '{}'",
    "UPDATE pgqueue.schedules SET task = 'other'",
    "INSERT INTO pgqueue.schedules (name, task, cron) VALUES ('n', 't', '* * * * *')",
    "SELECT args FROM pgqueue.jobs",
    "SELECT * FROM pgqueue.jobs",
    "SELECT jobs FROM pgqueue.jobs",
    "SELECT result FROM pgqueue.jobs",
    "SELECT traceback FROM pgqueue.job_attempts",
    "SELECT * FROM pgqueue.job_attempts",
    "UPDATE pgqueue.jobs SET attempts = attempts RETURNING args",
    "UPDATE pgqueue.jobs SET last_error = args::text",
    "UPDATE pgqueue.jobs SET args = '{}'",
    "UPDATE pgqueue.jobs SET task = 'other'",
    "UPDATE pgqueue.jobs SET max_attempts = 1",
    "INSERT INTO pgqueue.jobs (task) VALUES ('t')",
    "INSERT INTO pgqueue.leases (target_id, message_id, attempt, worker_id) "
    "VALUES (1, 1, 1, gen_random_uuid())",
    "UPDATE pgqueue.leases SET worker_id = gen_random_uuid()",
    "INSERT INTO pgqueue.workers (id) VALUES (gen_random_uuid())",
    "UPDATE pgqueue.workers SET dead_at = now()",
    "DELETE FROM pgqueue.workers",
    "UPDATE pgqueue.job_attempts SET error = ''",
    "UPDATE pgqueue.limits SET declared = 9",
]
NOT_WITHOUT_PRUNING = ["DELETE FROM pgqueue.jobs", "DELETE FROM pgqueue.job_attempts"]
FORBIDDEN = [
    *((purpose, sql) for purpose in ("worker", "enqueue", "dashboard") for sql in NOBODY),
    *((purpose, sql) for purpose in ("enqueue", "dashboard") for sql in NOT_WITHOUT_PRUNING),
    *(("enqueue", sql) for sql in NOT_ENQUEUE),
    *(("worker", sql) for sql in NOT_WORKER),
    *(("dashboard", sql) for sql in NOT_DASHBOARD),
]


@pytest.mark.parametrize(("purpose", "sql"), FORBIDDEN)
def test_what_is_not_its_work_is_refused_by_the_server(
    place: Place, purpose: str, sql: str
) -> None:
    with pytest.raises(DBAPIError) as refusal:
        place.run(purpose, sql)

    assert getattr(refusal.value.orig, "sqlstate", None) == INSUFFICIENT_PRIVILEGE, refusal.value


def test_a_role_that_has_been_revoked_can_do_nothing(place: Place) -> None:
    only = {"enqueue": place.names["enqueue"]}
    place.revoke(**only)

    with pytest.raises(DBAPIError, match="permission denied for schema"):
        place.run("enqueue", "INSERT INTO pgqueue.jobs (task) VALUES ('t')")

    place.grant(**only)
    place.run("enqueue", "INSERT INTO pgqueue.jobs (task) VALUES ('t')")


def test_rights_that_a_role_had_before_are_gone(place: Place) -> None:
    name = place.names["dashboard"]
    with place.admin.begin() as connection:
        connection.execute(text(f"GRANT SELECT ON pgqueue.jobs TO {name}"))
        connection.execute(text(f"GRANT SELECT (args) ON pgqueue.jobs TO {name}"))

        grant(dashboard=name, connection=connection)

    with pytest.raises(DBAPIError, match="permission denied"):
        place.run("dashboard", "SELECT args FROM pgqueue.jobs")


def test_one_role_may_serve_two_purposes(place: Place) -> None:
    name = place.names["dashboard"]
    place.grant(enqueue=name, dashboard=name)

    place.run("dashboard", "INSERT INTO pgqueue.jobs (task) VALUES ('t')")
    place.run("dashboard", "SELECT last_error FROM pgqueue.jobs")

    place.grant(dashboard=name)


def test_what_the_owner_had_goes_to_whoever_revokes(place: Place) -> None:
    names = {purpose: place.names[purpose] for purpose in ("migrator", "owner")}
    assert owners(place.admin) == {names["owner"]}
    place.revoke(**names)

    assert owners(place.admin) == {place.admin.url.username}

    place.grant(**names)


HOSTILE = """wor"ker'; DROP TABLE pgqueue.jobs; -- :name \\ $$ %I"""


@pytest.mark.parametrize("as_sql", [False, True])
def test_in_a_revision_names_are_quoted_online_and_offline(engine: Engine, as_sql: bool) -> None:
    name = HOSTILE if not as_sql else HOSTILE.replace("%I", "")
    script = io.StringIO()
    with engine.connect() as connection:
        in_quotes = name.replace('"', '""').replace(":", r"\:")
        connection.execute(text(f'CREATE ROLE "{in_quotes}"'))
        options = {"as_sql": as_sql, "output_buffer": script if as_sql else None}
        with Operations.context(MigrationContext.configure(connection, opts=options)):
            grant(worker=name)

        if as_sql:
            connection.exec_driver_sql(script.getvalue())

        may = text("SELECT has_table_privilege(:role, 'pgqueue.jobs', 'INSERT')")
        assert connection.execute(may, {"role": name}).scalar() is True
        connection.rollback()


@pytest.mark.parametrize(
    "names",
    [
        {"worker": "public"},
        {"worker": "PUBLIC"},
        {"enqueue": "none"},
        {"dashboard": ""},
        {"worker": "a\0b"},
        {"worker": "ä" * 32},
        {"worker": 7},
        {"worker": "a$pgqueue$b"},
        {"migrator": "m"},
        {},
    ],
)
def test_names_that_postgresql_would_take_for_others_are_refused(names: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        grant(**names)


def test_a_table_that_is_not_there_yet_is_passed_by(engine: Engine) -> None:
    """A revision of an application runs again from the beginning, with newer code."""
    with engine.begin() as connection, new_roles(engine) as names:
        connection.execute(text("DROP VIEW pgqueue.invariant_violations"))
        connection.execute(text("ALTER TABLE pgqueue.jobs RENAME meta TO other"))

        grant(dashboard=names["dashboard"], connection=connection)

        connection.rollback()
