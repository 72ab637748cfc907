"""Five roles on a real server: each does the whole of its work, and nothing else."""

import asyncio
import io
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from visitor import Visitor

from chaos.interleavings.logical_workers import (
    LogicalWorker,
    committed,
    declare_dead,
    execute,
    violations,
    worker_settings,
)
from pgqueue import Cancel, Limit, PgQueue, Retry, Snooze, Worker
from pgqueue.dashboard.pages import ROUTES
from pgqueue.errors import OptionError
from pgqueue.operations import Selection
from pgqueue.operations.actions import ON_JOBS
from pgqueue.repository.batches import Batches
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.error_groups import ErrorGroups
from pgqueue.repository.failures import FailedGroups
from pgqueue.repository.operator_actions import OperatorActions
from pgqueue.repository.prune import Pruning
from pgqueue.repository.queue_minutes import QueueMinutes
from pgqueue.repository.signals import Signals
from pgqueue.repository.tables import array_of
from pgqueue.repository.task_minutes import TaskMinutes
from pgqueue.repository.workers import Workers
from pgqueue.schema import grant, revoke, upgrade_database, verify
from pgqueue.schema.rights import ONE_RIGHT
from pgqueue.schema.roles import RIGHTS, Rights
from pgqueue.testing.databases import fresh_database
from pgqueue.worker.duties.ticks import Ticks

HOUR = timedelta(hours=1)
PURPOSES = ("worker", "enqueue", "dashboard", "migrator", "owner")
INSUFFICIENT_PRIVILEGE = "42501"

queue = PgQueue(application="shop")


@queue.task(name="tests.task")
def claimed_by_hand() -> None: ...


@queue.task
def succeed(n: int) -> int:
    return n


@queue.task(keep=timedelta(0))
def leave_nothing() -> None: ...


@queue.task(max_attempts=2, retry=Retry.constant(timedelta(0)))
def fail() -> None:
    raise ValueError("planned")


@queue.task(unique_key=lambda n: f"once {n}")
def once(n: int) -> None: ...


@queue.task(limit=(Limit(1, by="n"), Limit(60, per=HOUR, burst=9, name="rate")))
def one_at_a_time(n: int) -> None: ...


@queue.task(limit=Limit(2, name="alone"))
def alone(n: int) -> None: ...


@queue.task
def give_up() -> Cancel:
    return Cancel("no need")


@queue.task
def sleep_on() -> Snooze:
    return Snooze(HOUR)


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


@dataclass
class Place:
    """A database, its five roles, an engine for each, and jobs in every state."""

    admin: Engine
    names: dict[str, str]
    engines: dict[str, Engine]
    failed = waiting = limited = running = abandoned = 0
    """Ids of jobs."""
    batch = 0

    @classmethod
    def of(cls, admin: Engine, names: dict[str, str]) -> "Place":
        urls = {name: admin.url.set(username=role, password="x") for name, role in names.items()}
        return cls(admin, names, {name: create_engine(url) for name, url in urls.items()})

    def dispose(self) -> None:
        for engine in self.engines.values():
            engine.dispose()

    @contextmanager
    def session(self, purpose: str, *, commits: bool = True) -> Iterator[Session]:
        """A Session of a role; the queue belongs to the role from here on."""
        queue.bind(self.engines[purpose])
        with queue.session() as session:
            yield session
            (session.commit if commits else session.rollback)()

    def grant(self, **names: str) -> None:
        committed(self.admin, lambda connection: grant(**names, connection=connection))

    def revoke(self, **names: str) -> None:
        committed(self.admin, lambda connection: revoke(**names, connection=connection))

    def who_may(self, act: "str | Act") -> set[str]:
        """The roles to which the server does not refuse an operation, which is rolled back."""
        return {purpose for purpose in Rights._fields if self._may(purpose, act)}

    def _may(self, purpose: str, act: "str | Act") -> bool:
        try:
            with self.session(purpose, commits=False) as session:
                session.execute(text(act)) if isinstance(act, str) else act(session, self)
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != INSUFFICIENT_PRIVILEGE:
                raise
            return False
        return True


Act = Callable[[Session, Place], object]


@pytest.fixture(scope="module")
def place(server_url: str, template_url: str) -> Iterator[Place]:
    with fresh_database(server_url, template_url=template_url) as url:
        admin = create_engine(url)
        with new_roles(admin) as names:
            place = Place.of(admin, names)
            place.grant(**names)
            worker = worker_settings(place.engines["worker"].url)
            fill(place, [LogicalWorker(worker), LogicalWorker(worker)])
            yield place
            place.dispose()
        admin.dispose()


def fill(place: Place, workers: list[LogicalWorker]) -> None:
    """Write jobs in every state, each by the role whose work it is."""
    with place.session("enqueue") as session:
        place.failed = fail.enqueue(session).id
        with queue.batch(session, "mine", on_success=succeed) as batch:
            leave_nothing.enqueue(session)
            one_at_a_time.enqueue_many(session, [(n % 2,) for n in range(8)])
        for task in (give_up, sleep_on):
            task.enqueue(session)
    place.batch = batch.id
    queue.bind(place.engines["worker"])
    ended = Worker(queue, concurrency=2).run_until_empty(timeout=60)
    assert ended == {"succeeded": 10, "retried": 1, "failed": 1, "cancelled": 1, "snoozed": 1}
    execute(place.admin, "UPDATE pgqueue.batches SET ended_at = ended_at - interval '9 years'")
    with place.session("enqueue") as session:
        place.waiting = once.enqueue(session, 1).id
        place.limited = one_at_a_time.options(delay=HOUR).enqueue(session, 1).id
        place.running = claimed_by_hand.options(queue="slow").enqueue(session).id
        place.abandoned = claimed_by_hand.options(queue="dead").enqueue(session).id
        queue.schedules.add(session, succeed, every=HOUR, name="hourly", args=(1,))
    alive, dead = workers
    assert alive.claim(queue="slow")
    assert dead.claim(queue="dead")
    dead.close()
    declare_dead(place.admin, dead)
    assert violations(place.admin) == []


def enqueues_by_every_door(session: Session, place: Place) -> None:
    session.add_all([succeed.job(1), once.job(2), one_at_a_time.job(1)])
    session.flush()
    assert once.enqueue(session, 1).id == place.waiting
    assert once.enqueue_many(session, [(1,), (1,)]) == [place.waiting] * 2
    one_at_a_time.enqueue_many(session, [(1,), (2,)])
    one_at_a_time.options(delay=HOUR, priority=1).enqueue(session, 4)
    succeed.delay(5)
    asyncio.run(_enqueue_async(session.get_bind().engine.url))


async def _enqueue_async(url: URL) -> None:
    engine = create_async_engine(url)
    async with AsyncSession(engine) as session:
        await once.enqueue_async(session, 3)
    await engine.dispose()


def enqueues_by_name(session: Session, place: Place) -> None:
    queue.enqueue_by_name(session, one_at_a_time.name, {"n": 1})
    key = queue.enqueue_by_name(session, once.name, {"n": 1}, unique_key="once 1")
    assert key == place.waiting


def writes_batches_and_schedules(session: Session, place: Place) -> None:
    with queue.batch(
        session, "more", on_success=succeed, on_failure=succeed, on_cancelled=succeed
    ) as batch:
        succeed.enqueue(session, 1)
    with queue.extend_batch(session, batch.id):
        succeed.enqueue_many(session, [(2,), (3,)])
    queue.schedules.add(session, succeed, every=HOUR, name="more", args=(1,))
    queue.schedules.change(session, "more", "0 3 * * *", args=(2,), priority=1)
    queue.schedules.trigger(session, "more")


def removes_a_schedule(session: Session, place: Place) -> None:
    queue.schedules.remove(session, "hourly")


def pauses_a_schedule(session: Session, place: Place) -> None:
    queue.schedules.pause(session, "hourly")
    queue.schedules.resume(session, "hourly")
    assert queue.schedules.list(session)


def pauses_queues_and_tasks(session: Session, place: Place) -> None:
    queue.pause(session, "mail")
    queue.resume(session, "mail")
    queue.pause_task(session, "tests.task")
    queue.resume_task(session, "tests.task")


def operates_on_jobs_limits_and_workers(session: Session, place: Place) -> None:
    for job in (place.waiting, place.limited):
        queue.change(session, job, queue="other", priority=1, delay=timedelta(minutes=1))
        queue.run_now(session, job)
    for job in (place.waiting, place.limited, place.running):
        queue.cancel(session, job)
    for job in (place.waiting, place.limited, place.failed):
        queue.requeue(session, job)
    queue.cancel_where(session, queue="default")
    for capacity in (0, None):
        queue.set_limit(session, f"{one_at_a_time.name}:n", capacity, key=7)
    for limit in ("rate", "alone"):  # no worker has declared the second
        queue.set_limit(session, limit, 30)
    queue.quiet(session, uuid.uuid4())
    queue.unquiet(session, uuid.uuid4())
    ErrorGroups(session).mute(1, "a", HOUR)


def reads_and_checks(session: Session, place: Place) -> None:
    assert queue.counts(session)
    assert queue.limits(session)
    assert queue.batches(session)
    assert queue.get_batch(session, place.batch).total == 9
    TaskMinutes(session).since(HOUR)
    ErrorGroups(session).newest(limit=1)
    FailedGroups(session).newest(JobFilter(tag="a"), limit=1, is_limited=True)
    Selection(after=0).preview(session, ON_JOBS["requeue"])
    assert queue.check(session) == []


def verifies_the_tables(session: Session, place: Place) -> None:
    verify(session.connection())


def claims(session: Session, place: Place) -> None:
    with queue.claim(session) as claimed:
        assert claimed is not None


def rescues(session: Session, place: Place) -> None:
    assert [each.job_id for each in Workers(session).rescue()] == [place.abandoned]


def fires_schedules(session: Session, place: Place) -> None:
    is_due = "UPDATE pgqueue.schedules SET next_at = now() - interval '1 hour', last_tick_at = NULL"
    execute(place.admin, is_due)
    with queue.engine.connect() as connection:
        Ticks(queue.tasks, array_of(queue.tasks), queue.schedules).fire(connection)
        with connection.begin():
            queue.schedules.synchronise(connection)


def counts_and_prunes(session: Session, place: Place) -> None:
    QueueMinutes(session).count()
    ErrorGroups(session).note_deploy("", "v1")
    pruning = Pruning(session)
    for dead in (True, False):
        pruning.prune(queue.retention, pruning.references(), dead=dead, after=0, size=100)
    Batches(session).prune(place.batch, queue.retention, 100)
    QueueMinutes(session).prune()
    TaskMinutes(session).prune()
    ErrorGroups(session).prune()
    ErrorGroups(session).prune_deploys()
    OperatorActions(session).prune()
    Signals(session).undelivered(0)
    Signals(session).sleepers([1], after=0)
    Signals(session).mark_delivered([1])
    Signals(session).prune()


def sends_a_signal(session: Session, place: Place) -> None:
    queue.signal(session, "paid", 7, {"by": "card"})


def waits_for_a_job(session: Session, place: Place) -> None:
    assert queue.wait(place.failed, timeout=timedelta(seconds=60)).has_ended


ALL, NOBODY = {"worker", "enqueue", "dashboard"}, set[str]()
WORKER, ENQUEUE, DASHBOARD = {"worker"}, {"enqueue"}, {"dashboard"}

WHO_MAY: list[tuple[set[str], str | Act]] = [
    (WORKER | ENQUEUE, enqueues_by_every_door),
    (WORKER | ENQUEUE, writes_batches_and_schedules),
    (WORKER | ENQUEUE, enqueues_by_name),
    (WORKER | ENQUEUE, "SELECT pgqueue.enqueue('elsewhere', queue => 'default')"),
    (WORKER | ENQUEUE, "SELECT pgqueue.canonical_text('1')"),
    (WORKER, "UPDATE pgqueue.tasks SET declaration = '{}' WHERE false"),
    (ALL, sends_a_signal),
    (WORKER, "SELECT payload FROM pgqueue.signals"),
    (WORKER | DASHBOARD, "SELECT name, key FROM pgqueue.signals"),
    (NOBODY, "UPDATE pgqueue.signals SET payload = NULL WHERE false"),
    (ENQUEUE, removes_a_schedule),
    (ALL, pauses_a_schedule),
    (DASHBOARD, pauses_queues_and_tasks),
    (WORKER | DASHBOARD, operates_on_jobs_limits_and_workers),
    (WORKER | DASHBOARD, reads_and_checks),
    (ALL, verifies_the_tables),
    (WORKER, waits_for_a_job),
    (WORKER, claims),
    (WORKER, rescues),
    (WORKER | ENQUEUE, fires_schedules),
    (WORKER, counts_and_prunes),
    # PostgreSQL checks the rights also of a statement that changes no row.
    (WORKER, "SELECT args FROM pgqueue.jobs"),
    (WORKER, "SELECT result FROM pgqueue.jobs"),
    (WORKER, "SELECT jobs FROM pgqueue.jobs"),
    (WORKER, "SELECT id FROM pgqueue.jobs WHERE args ->> 'token' = 'x'"),
    (WORKER | DASHBOARD, "SELECT last_error, meta, progress FROM pgqueue.jobs"),
    (ALL, "SELECT attempts, snoozes, interruptions FROM pgqueue.jobs"),
    (WORKER | ENQUEUE, "INSERT INTO pgqueue.jobs (task) SELECT 't' WHERE false"),
    (WORKER, "INSERT INTO pgqueue.jobs (task) SELECT 't' WHERE false RETURNING args"),
    (WORKER, "UPDATE pgqueue.jobs SET args = '{}' WHERE false"),
    (WORKER, "UPDATE pgqueue.jobs SET task = 'other', max_attempts = 1 WHERE false"),
    (WORKER, "UPDATE pgqueue.jobs SET held_unique_key = args::text WHERE false"),
    (ALL, "UPDATE pgqueue.jobs SET held_unique_key = NULL WHERE false"),
    (WORKER | DASHBOARD, "UPDATE pgqueue.jobs SET outcome = 'cancelled' WHERE false"),
    (WORKER, "DELETE FROM pgqueue.jobs WHERE false"),
    (WORKER | DASHBOARD, "SELECT * FROM pgqueue.message_queue"),
    (WORKER | DASHBOARD, "DELETE FROM pgqueue.message_queue WHERE false"),
    (NOBODY, "UPDATE pgqueue.message_queue SET target_id = 1"),
    (WORKER | DASHBOARD, "SELECT * FROM pgqueue.waiting_messages"),
    (WORKER | DASHBOARD, "DELETE FROM pgqueue.waiting_messages WHERE false"),
    (WORKER | DASHBOARD, "SELECT * FROM pgqueue.leases"),
    (WORKER, "INSERT INTO pgqueue.leases (target_id) SELECT 1 WHERE false"),
    (WORKER, "UPDATE pgqueue.leases SET worker_id = gen_random_uuid() WHERE false"),
    (WORKER | DASHBOARD, "SELECT error FROM pgqueue.job_attempts"),
    (WORKER, "SELECT traceback FROM pgqueue.job_attempts"),
    (WORKER, "DELETE FROM pgqueue.job_attempts WHERE false"),
    (NOBODY, "UPDATE pgqueue.job_attempts SET error = ''"),
    (WORKER | DASHBOARD, "SELECT * FROM pgqueue.dead_letters"),
    (NOBODY, "UPDATE pgqueue.dead_letters SET outcome = 'failed'"),
    (WORKER | DASHBOARD, "SELECT * FROM pgqueue.workers"),
    (WORKER, "INSERT INTO pgqueue.workers (id) SELECT gen_random_uuid() WHERE false"),
    (WORKER, "UPDATE pgqueue.workers SET dead_at = now() WHERE false"),
    (WORKER, "DELETE FROM pgqueue.workers WHERE false"),
    (NOBODY, "DELETE FROM pgqueue.queues"),
    (WORKER | DASHBOARD, "DELETE FROM pgqueue.limit_places WHERE false"),
    (WORKER, "UPDATE pgqueue.limits SET declared = 9 WHERE false"),
    (WORKER | DASHBOARD, "SELECT * FROM pgqueue.batches"),
    (WORKER | DASHBOARD, "UPDATE pgqueue.batches SET ended_at = now() WHERE false"),
    (WORKER, "UPDATE pgqueue.batches SET name = '' WHERE false"),
    (WORKER | ENQUEUE | DASHBOARD, "UPDATE pgqueue.blocked SET waits_for = 0 WHERE false"),
    (WORKER | DASHBOARD, "DELETE FROM pgqueue.blocked WHERE false"),
    (WORKER, "DELETE FROM pgqueue.dependencies WHERE false"),
    (WORKER, "DELETE FROM pgqueue.batch_jobs WHERE false"),
    (WORKER | ENQUEUE, "SELECT args FROM pgqueue.schedules"),
    (WORKER | ENQUEUE, "UPDATE pgqueue.schedules SET args = '{}' WHERE false"),
    (WORKER | ENQUEUE, "UPDATE pgqueue.schedules SET task = 'other' WHERE false"),
    (WORKER | DASHBOARD, "SELECT message FROM pgqueue.error_groups"),
    (WORKER, "DELETE FROM pgqueue.error_groups WHERE false"),
    (WORKER, "UPDATE pgqueue.task_minutes SET failed = 0 WHERE false"),
    (NOBODY, "UPDATE pgqueue.deploys SET version = ''"),
    (NOBODY, "UPDATE pgqueue.operator_actions SET actor = ''"),
    (WORKER, "DELETE FROM pgqueue.operator_actions WHERE false"),
    (DASHBOARD, "SELECT * FROM pgqueue.job_overview"),
    (DASHBOARD, "SELECT FROM pgqueue.invariant_violations, pgqueue.invariant_violations_in_flight"),
    (NOBODY, "UPDATE pgqueue.schema_version SET oldest_code = 99"),
    (NOBODY, "DELETE FROM pgqueue.schema_version"),
    (NOBODY, "TRUNCATE pgqueue.jobs"),
    (NOBODY, "CREATE TABLE pgqueue.mine (id int)"),
    (NOBODY, "CREATE FUNCTION pgqueue.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'"),
    (NOBODY, "ALTER TABLE pgqueue.jobs DISABLE TRIGGER ALL"),
    (NOBODY, "CREATE INDEX ON pgqueue.jobs (task)"),
    (NOBODY, "CREATE RULE spy AS ON INSERT TO pgqueue.jobs DO ALSO NOTHING"),
    (NOBODY, "DROP VIEW pgqueue.invariant_violations"),
    (NOBODY, "DROP SCHEMA pgqueue CASCADE"),
]


@pytest.mark.parametrize(("roles", "act"), WHO_MAY)
def test_a_role_does_its_work_and_nothing_else(
    place: Place, roles: set[str], act: str | Act
) -> None:
    assert place.who_may(act) == roles


def test_a_dashboard_shows_its_pages_and_acts_on_many_jobs(place: Place) -> None:
    queue.bind(place.engines["dashboard"])
    visitor = Visitor(queue)
    for route in ROUTES:
        if route.method == "GET" and "<" not in route.rule:
            # 400: a page that needs a parameter.
            assert visitor.get(route.rule).status_code in (200, 400), route.rule
    for page in (f"/jobs/{place.failed}", f"/jobs/{place.limited}", f"/tasks/{fail.name}"):
        assert visitor.get(page).status_code == 200, page
    by_argument = visitor.text(f"/jobs?q=task:{fail.name}+arg.number:1", status=403)
    assert "the database role of the dashboard does not have the right" in by_argument

    with place.session("enqueue") as session:
        for task in (succeed, one_at_a_time):
            task.options(queue="many").enqueue_many(session, [(1,), (2,)])
    queue.bind(place.engines["dashboard"])
    ada, these = queue.operate("ada"), Selection(after=0, queue="many")
    assert ada.cancel(these).changed == 4
    assert ada.requeue(these, spread=HOUR).changed == 4
    assert ada.run_now(these).changed == 3, "the first is due"
    assert ada.change(these, priority=7).changed == 4


def test_a_migrator_upgrades_and_grants_as_the_owner(server_url: str) -> None:
    with fresh_database(server_url) as url:
        admin = create_engine(url)
        with new_roles(admin) as names:
            place = Place.of(admin, names)
            with admin.begin() as connection:
                connection.execute(text(f"CREATE SCHEMA pgqueue AUTHORIZATION {names['owner']}"))
                connection.execute(text(f"GRANT {names['owner']} TO {names['migrator']}"))
                # To be owner of a schema, PostgreSQL asks for the right to create one.
                create = f"GRANT CREATE ON DATABASE {admin.url.database} TO {names['owner']}"
                connection.execute(text(create))

            upgrade_database(place.engines["migrator"])
            with place.engines["migrator"].begin() as connection:
                grant(**names, connection=connection)
                grant(**names, connection=connection)

            with place.engines["worker"].connect() as connection:
                verify(connection)
            assert owners(admin) == {names["owner"]}
            place.dispose()
        admin.dispose()


def owners(engine: Engine) -> set[str]:
    statement = """
        SELECT pg_get_userbyid(relowner) FROM pg_class
        WHERE relnamespace = 'pgqueue'::regnamespace AND relkind IN ('r', 'v', 'S')
        UNION SELECT pg_get_userbyid(typowner) FROM pg_type
        WHERE typnamespace = 'pgqueue'::regnamespace
        UNION SELECT pg_get_userbyid(proowner) FROM pg_proc
        WHERE pronamespace = 'pgqueue'::regnamespace
        UNION SELECT pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = 'pgqueue'
    """
    with engine.connect() as connection:
        return set(connection.scalars(text(statement)))


def test_after_a_grant_a_role_has_exactly_its_rights_whatever_it_had_before(place: Place) -> None:
    name = place.names["dashboard"]
    with place.admin.begin() as connection:
        connection.execute(text(f"GRANT SELECT, TRUNCATE ON pgqueue.jobs TO {name}"))
        connection.execute(text(f"GRANT SELECT (args) ON pgqueue.jobs TO {name}"))

        grant(dashboard=name, connection=connection)

    assert all(has_exactly_its_rights(place, purpose) for purpose in Rights._fields)


def has_exactly_its_rights(place: Place, purpose: str) -> bool:
    """Compare what a role may do, also as PUBLIC, with the table of rights, column by column."""
    may = text("""
        SELECT relname, attname, privilege,
               CASE WHEN privilege IN ('DELETE', 'TRUNCATE', 'TRIGGER')
                    THEN has_table_privilege(:role, pg_class.oid, privilege)
                    ELSE has_column_privilege(:role, pg_class.oid, attnum, privilege) END
        FROM pg_class
        JOIN pg_attribute ON attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped
        CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'REFERENCES',
                                'DELETE', 'TRUNCATE', 'TRIGGER']) AS privilege
        WHERE relnamespace = 'pgqueue'::regnamespace AND relkind IN ('r', 'v')
    """)
    with place.admin.connect() as connection:
        rows = connection.execute(may, {"role": place.names[purpose]}).all()
    assert rows
    return all(
        has == is_granted(getattr(RIGHTS.get(table, Rights()), purpose), privilege, column)
        for table, column, privilege, has in rows
    )


def is_granted(rights: str, privilege: str, column: str) -> bool:
    columns = dict(ONE_RIGHT.findall(rights)).get(privilege)
    return columns == "" or column in (columns or "").split(", ")


def test_a_role_that_has_been_revoked_can_do_nothing(place: Place) -> None:
    only = {"enqueue": place.names["enqueue"]}
    place.revoke(**only)

    assert place.who_may("INSERT INTO pgqueue.jobs (task) VALUES ('t')") == WORKER

    place.grant(**only)


def test_one_role_may_serve_two_purposes(place: Place) -> None:
    name = place.names["dashboard"]
    place.grant(enqueue=name, dashboard=name)

    assert "dashboard" in place.who_may("INSERT INTO pgqueue.jobs (task) VALUES ('t')")
    assert "dashboard" in place.who_may("SELECT last_error FROM pgqueue.jobs")

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
