"""A schema of the search_path in which others may create: nothing of theirs runs with our rights.

The manual says which function or operator a name means:
https://www.postgresql.org/docs/current/typeconv.html
"""

import ast
import io
import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from click.testing import CliRunner
from sqlalchemy import URL, Engine, NullPool, create_engine, make_url, select, text
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from traps import all_commands, all_statements, is_stepped_on, set_traps

import pgqueue
from pgqueue import Job, JobStatus, PgQueue, Retry, Worker
from pgqueue.cli import main
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import CLAIMING, UPKEEP
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.listing import Listing
from pgqueue.repository.pages import Pages
from pgqueue.schema import (
    SCHEMA_VERSION,
    downgrade,
    grant,
    revoke,
    upgrade,
    upgrade_database,
    verify,
)
from pgqueue.testing.databases import fresh_database

pytestmark = pytest.mark.journey

PURPOSES = ("worker", "enqueue", "dashboard", "migrator", "owner")
PACKAGE = Path(pgqueue.__file__).parent

PATH = "public, pg_catalog"
"""It lets even a function with the very arguments of PostgreSQL's come first."""

CALL = re.compile(r"(?<![\w.])(\w+)\s?\(")
WORDS_OF_SQL = {
    *("all", "and", "any", "array", "as", "cast", "conflict", "else", "except", "exists"),
    *("filter", "from", "if", "in", "join", "lateral", "not", "or", "select", "then", "values"),
    *("when", "where", "over", "on", "to", "by", "update", "using"),
}
FUNCTIONS_OF_GRAMMAR = {"coalesce", "extract", "greatest", "least", "nullif"}
"""The parser itself knows them: nobody looks for them in a path."""
ARRAY = r"(?:CAST\(%\(\w+\)s::VARCHAR AS \w+\[\]\)|[\w.]+)"
UNNEST_OF_SEVERAL = re.compile(rf"(?<!\.)unnest\((?={ARRAY}, )")
"""So does it, but only without a schema."""
NAMED_COLUMNS = re.compile(
    r"\b(?:AS|INTO|WITH ORDINALITY AS|WITH RECURSIVE) [\w.]+ ?\(|\b\w+\((?=[\w, ]+\) AS\s+\()"
)
"""Of an alias, of an INSERT, or of a further common table expression."""
OF_CATALOG = re.compile(r"\b(?:FROM|JOIN) (pg_(?!catalog\.)\w+)")


def unqualified(words: str) -> set[str]:
    """The functions, and PostgreSQL's tables and views, that are named without their schema."""
    words = re.sub(r"'[^']*'", "''", words)
    words = NAMED_COLUMNS.sub("", UNNEST_OF_SEVERAL.sub("", words))
    called = set(map(str.lower, CALL.findall(words))) - WORDS_OF_SQL - FUNCTIONS_OF_GRAMMAR
    return called | set(OF_CATALOG.findall(words))


def test_a_statement_names_what_is_postgresqls_in_full() -> None:
    short = {name: unqualified(words) for name, words in all_statements()}

    assert {name: found for name, found in short.items() if found} == {}


def test_a_command_about_rights_names_what_is_postgresqls_in_full() -> None:
    short = {command: unqualified(command) for command in all_commands()}

    assert {command: found for command, found in short.items() if found} == {}


def test_what_is_called_by_a_short_name_is_grammar() -> None:
    grammar = {*FUNCTIONS_OF_GRAMMAR, "array", "unnest", "pg_catalog"}
    called = {
        path: {
            node.attr
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "func"
        }
        for path in PACKAGE.rglob("*.py")
        if "demo" not in path.parts
    }

    assert {path: names - grammar for path, names in called.items() if names - grammar} == {}


@pytest.fixture(scope="module")
def trapped_template(server_url: str, template_url: str) -> Iterator[str]:
    with fresh_database(server_url, template_url=template_url) as url:
        set_traps(create_engine(url, poolclass=NullPool))
        yield url


@pytest.fixture
def plain_engine(server_url: str, trapped_template: str) -> Iterator[Engine]:
    """On a database full of traps, with a path that leads past them."""
    with fresh_database(server_url, template_url=trapped_template) as url:
        engine = engine_on(make_url(url), path="pg_catalog")
        yield engine
        engine.dispose()


AS_IT_IS = {"no_parameters": True}
PARAMETER = re.compile(r"%\((\w+)\)s")


def as_function(words: str) -> str:
    """The statement as the body of a function in SQL: the server notes what its names mean."""
    names = list(dict.fromkeys(PARAMETER.findall(words)))
    types = ["text[]" if name == "names" else "text" for name in names]
    body = PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", words).replace("%%", "%")
    return (
        f"CREATE FUNCTION public.body({', '.join(types)}) RETURNS void LANGUAGE sql "
        f"BEGIN ATOMIC {body}; END"
    )


MEANT = text(
    """
    SELECT pg_catalog.pg_describe_object(refclassid, refobjid, refobjsubid)
    FROM pg_catalog.pg_depend
    WHERE objid = 'public.body'::regproc::oid AND refobjid >= 16384::oid
      AND refclassid IN ('pg_operator'::regclass, 'pg_proc'::regclass, 'pg_type'::regclass)
    """
)


def test_no_name_in_a_statement_means_what_another_role_has_made(plain_engine: Engine) -> None:
    meant: dict[str, list[str]] = {}
    with plain_engine.connect() as connection:
        for name, words in all_statements():
            connection.exec_driver_sql("SET LOCAL search_path = public")
            try:
                connection.exec_driver_sql(as_function(words), execution_options=AS_IT_IS)
                meant[name] = list(connection.scalars(MEANT))
            except ProgrammingError as error:  # the types do not fit any more
                meant[name] = [str(error.orig)]
            connection.rollback()

    assert {name: found for name, found in meant.items() if found} == {}


@pytest.fixture
def trapped_engine(plain_engine: Engine) -> Iterator[Engine]:
    """The same database, with a path that leads into the traps."""
    engine = engine_on(plain_engine.url, path=PATH)
    yield engine
    engine.dispose()


def engine_on(url: URL, *, path: str) -> Engine:
    return create_engine(url, connect_args={"options": f"-csearch_path={path.replace(' ', '')}"})


def assert_armed(engine: Engine) -> None:
    """The traps are where names are looked up, and work."""
    with engine.connect() as connection, pytest.raises(DBAPIError, match="stepped on"):
        connection.exec_driver_sql("SELECT 'a'::text = 'a'::varchar")
    with engine.begin() as connection:
        connection.exec_driver_sql("SELECT pg_catalog.setval('public.steps', 1, false)")


def test_a_worker_calls_nothing_of_other_roles(
    plain_engine: Engine, trapped_engine: Engine
) -> None:
    assert_armed(trapped_engine)
    queue = PgQueue(trapped_engine)
    paths: set[str] = set()

    @queue.task
    def alone() -> None: ...

    @queue.task
    def with_session(session: Session) -> None:
        paths.add(session.execute(text("SHOW search_path")).scalar_one())
        with_session_async.enqueue(session)

    @queue.task
    async def with_session_async(session: AsyncSession) -> None:
        paths.add((await session.execute(text("SHOW search_path"))).scalar_one())
        await alone.enqueue_async(session)

    @queue.task(retry=Retry.never())
    def fail(session: Session) -> None:
        raise ValueError("as ever")

    @queue.task(max_attempts=2, retry=Retry.constant(timedelta(0)))
    def fail_twice() -> None:
        raise ValueError("as ever")

    for task in (alone, with_session, fail, fail_twice):
        task.delay()
    Worker(queue, concurrency=2).run_until_empty(timeout=60)

    with Session(plain_engine) as session:
        ended = session.scalars(select(Job.outcome).order_by(Job.outcome)).all()
        assert queue.check(session) == []
    assert ended == ["failed"] * 2 + ["succeeded"] * 4
    assert paths == {path_of(trapped_engine)}
    assert not is_stepped_on(plain_engine)


def test_the_connections_of_a_worker_alone_have_a_path_of_their_own(
    trapped_engine: Engine,
) -> None:
    for settings in (CLAIMING, UPKEEP):
        with own_connection(trapped_engine, settings) as connection:
            path = connection.exec_driver_sql("SHOW search_path").scalar_one()
            assert path == "pg_catalog, pg_temp"


def test_an_application_calls_nothing_of_other_roles(
    plain_engine: Engine, trapped_engine: Engine
) -> None:
    engine = engine_on(trapped_engine.url, path=PATH)
    assert_armed(engine)
    queue = PgQueue(engine)

    @queue.task
    def once(number: int) -> None: ...

    @queue.task(unique_key=lambda name: name)
    def by_name(name: str) -> None: ...

    later, at = timedelta(hours=1), datetime.now(UTC) + timedelta(hours=1)
    once.delay(1)
    by_name.delay("a")
    by_name.delay("a")
    with queue.session() as session:
        first = once.enqueue(session, 2)
        once.enqueue_many(session, [(3,), (4,)])
        once.options(delay=later).enqueue(session, 5)
        once.options(run_at=at).enqueue(session, 6)
        by_name.enqueue(session, "a")
        by_name.enqueue_many(session, [("a",), ("b",)])
        session.add(by_name.job("c"))
        session.add(once.options(delay=later).job(7))
        session.add(once.options(run_at=at).job(8))
        session.flush()
        queue.cancel(session, first.id)
        queue.requeue(session, first.id)
        queue.pause(session, "default")
        queue.pause_task(session, "tests.task")
        queue.resume(session, "default")
        queue.resume_task(session, "tests.task")
        session.delete(session.get_one(Job, first.id))
        session.commit()
        for status in JobStatus:
            session.scalars(select(Job).where(Job.status == status)).all()
            session.scalars(select(Job).where(Job.status != status)).all()
        found = session.scalars(select(Job).order_by(Job.status)).all()
        assert {job.status for job in found} == {JobStatus.PENDING}
        assert queue.check(session) == []
        assert [count.jobs for count in queue.counts(session)] == [len(found)]
        Pages(session).page(JobFilter(task="t", queue="q"), limit=9)
        Listing(session).job(found[0].id)

    assert not is_stepped_on(plain_engine)
    engine.dispose()


COMMANDS = ["upgrade", "doctor", "status", "status --exact", "jobs", "jobs --status pending"]
COMMANDS += ["jobs {id}", "cancel {id}", "requeue {id}", "cancel --status pending --yes"]


def test_the_commands_of_an_operator_call_nothing_of_other_roles(
    plain_engine: Engine, trapped_engine: Engine
) -> None:
    assert_armed(trapped_engine)
    queue = PgQueue(trapped_engine)
    id = queue.task(name="known")(lambda: None).delay().id
    options = {"options": f"-csearch_path={path_of(trapped_engine).replace(' ', '')}"}
    url = trapped_engine.url.update_query_dict(options).render_as_string(hide_password=False)

    for line in COMMANDS:
        words = line.format(id=id).split()
        told = CliRunner().invoke(main, ["--url", url, *words])
        # What is wrong with a server of the tests, the doctor tells by 1.
        assert told.exit_code in ((0, 1) if line == "doctor" else (0,)), told.output

    assert not is_stepped_on(plain_engine)


def test_rights_are_given_and_taken_by_nothing_of_other_roles(
    plain_engine: Engine, trapped_engine: Engine
) -> None:
    assert_armed(trapped_engine)
    names = {purpose: f"{purpose}_{uuid.uuid4().hex[:8]}" for purpose in PURPOSES}
    with trapped_engine.connect() as connection:
        for name in names.values():
            connection.exec_driver_sql(f"CREATE ROLE {name}")
        grant(**names, connection=connection)
        revoke(**names, connection=connection)
        connection.rollback()

    assert not is_stepped_on(plain_engine)


def path_of(engine: Engine) -> str:
    with engine.connect() as connection:
        return str(connection.exec_driver_sql("SHOW search_path").scalar_one())


MEANT_BY_TABLES = text(
    """
    SELECT pg_catalog.pg_describe_object(classid, objid, objsubid),
           pg_catalog.pg_describe_object(refclassid, refobjid, refobjsubid)
    FROM pg_catalog.pg_depend
    WHERE refclassid IN ('pg_operator'::regclass, 'pg_proc'::regclass, 'pg_type'::regclass)
      AND classid IN ('pg_rewrite'::regclass, 'pg_attrdef'::regclass, 'pg_constraint'::regclass)
      AND refobjid >= 16384::oid
    """
)


@pytest.fixture(scope="module")
def empty_trapped_template(server_url: str) -> Iterator[str]:
    with fresh_database(server_url) as url:
        set_traps(create_engine(url, poolclass=NullPool))
        yield url


@pytest.fixture
def empty_plain_engine(server_url: str, empty_trapped_template: str) -> Iterator[Engine]:
    with fresh_database(server_url, template_url=empty_trapped_template) as url:
        engine = engine_on(make_url(url), path="pg_catalog")
        yield engine
        engine.dispose()


@pytest.fixture
def empty_engine(empty_plain_engine: Engine) -> Iterator[Engine]:
    engine = engine_on(empty_plain_engine.url, path=PATH)
    assert_armed(engine)
    yield engine
    engine.dispose()
    assert not is_stepped_on(empty_plain_engine)
    with empty_plain_engine.connect() as connection:
        assert connection.execute(MEANT_BY_TABLES).all() == []


def test_the_tables_are_made_of_nothing_of_other_roles(empty_engine: Engine) -> None:
    upgrade_database(empty_engine)


def test_a_host_makes_the_tables_of_nothing_of_other_roles_and_keeps_its_path(
    empty_engine: Engine,
) -> None:
    own = "SET LOCAL search_path = public, pg_catalog, pg_toast"
    paths = []
    with empty_engine.connect() as connection:
        before = connection.exec_driver_sql("SHOW search_path").scalar_one()
        connection.rollback()
        with connection.begin(), Operations.context(MigrationContext.configure(connection)):
            upgrade(to=SCHEMA_VERSION)
            paths.append(connection.exec_driver_sql("SHOW search_path").scalar_one())
            downgrade(to=0)
            connection.exec_driver_sql(own)
            upgrade(to=1)
            upgrade(to=SCHEMA_VERSION)
            paths.append(connection.exec_driver_sql("SHOW search_path").scalar_one())
        paths.append(connection.exec_driver_sql("SHOW search_path").scalar_one())

    assert paths == [before, own.partition(" = ")[2], before]


def test_a_script_makes_the_tables_of_nothing_of_other_roles_and_keeps_the_path(
    empty_engine: Engine,
) -> None:
    script = io.StringIO()
    options = {"as_sql": True, "output_buffer": script, "literal_binds": True}
    context = MigrationContext.configure(dialect_name="postgresql", opts=options)
    with Operations.context(context):
        upgrade(to=SCHEMA_VERSION, base=0)

    with empty_engine.begin() as connection:
        before = connection.exec_driver_sql("SHOW search_path").scalar_one()
        connection.exec_driver_sql(script.getvalue(), execution_options=AS_IT_IS)
        after = connection.exec_driver_sql("SHOW search_path").scalar_one()

    assert after == before


def test_a_script_of_the_stand_alone_history_makes_the_tables_of_nothing_of_other_roles(
    empty_engine: Engine,
) -> None:
    script = io.StringIO()
    config = Config(output_buffer=script)
    config.set_main_option("script_location", "pgqueue:migrations")
    command.upgrade(config, "head", sql=True)

    with empty_engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        connection.exec_driver_sql(script.getvalue(), execution_options=AS_IT_IS)
        verify(connection)
