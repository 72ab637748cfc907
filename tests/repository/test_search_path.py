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
from pgqueue.schema import (
    SCHEMA_VERSION,
    downgrade,
    grant,
    revoke,
    upgrade,
)
from pgqueue.testing.databases import fresh_database

pytestmark = pytest.mark.journey

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


OURS = ("type pgqueue.", "function pgqueue.")
"""Statements name the domains of the tables, and our function, in full."""


def test_no_name_in_a_statement_means_what_another_role_has_made(plain_engine: Engine) -> None:
    meant: dict[str, list[str]] = {}
    with plain_engine.connect() as connection:
        for name, words in all_statements():
            connection.exec_driver_sql("SET LOCAL search_path = public")
            try:
                connection.exec_driver_sql(as_function(words), execution_options=AS_IT_IS)
                found = connection.scalars(MEANT)
                meant[name] = [thing for thing in found if not thing.startswith(OURS)]
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


LATER = timedelta(hours=1)
COMMANDS = ["upgrade", "doctor", "status", "status --exact", "jobs", "jobs --status pending"]
COMMANDS += ["jobs {id}", "cancel {id}", "requeue {id}", "cancel --status pending --yes"]


def test_applications_workers_and_commands_call_nothing_of_other_roles(
    plain_engine: Engine, trapped_engine: Engine
) -> None:
    assert_armed(trapped_engine)
    queue = PgQueue(trapped_engine)
    paths: set[str] = set()

    @queue.task(unique_key=lambda name: name)
    def by_name(name: str) -> None: ...

    @queue.task
    def with_session(session: Session) -> None:
        paths.add(session.execute(text("SHOW search_path")).scalar_one())
        by_name.enqueue_many(session, [("a",), ("b",), ("b",)])

    @queue.task(max_attempts=2, retry=Retry.constant(timedelta(0)))
    async def fail_twice(session: AsyncSession) -> None:
        await by_name.enqueue_async(session, "c")
        raise ValueError("as ever")

    with_session.delay()
    fail_twice.delay()
    Worker(queue, concurrency=2).run_until_empty(timeout=60)

    with queue.session() as session:
        job_id = by_name.options(delay=LATER).enqueue(session, "d").id
        session.add(by_name.options(run_at=datetime.now(UTC) + LATER).job("e"))
        session.flush()
        queue.pause(session, "default")
        queue.resume(session, "default")
        session.commit()
        for status in JobStatus:
            session.scalars(select(Job).where(Job.status == status)).all()
            session.scalars(select(Job).where(Job.status != status)).all()
        ended = [job.status for job in session.scalars(select(Job).order_by(Job.status, Job.id))]
        assert ended == ["failed"] + ["pending"] * 2 + ["succeeded"] * 3
        assert queue.check(session) == []
        assert [count.jobs for count in queue.counts(session)]
        purposes = ("worker", "enqueue", "dashboard", "migrator", "owner")
        roles = {purpose: f"{purpose}_{uuid.uuid4().hex[:8]}" for purpose in purposes}
        for role in roles.values():
            session.execute(text(f"CREATE ROLE {role}"))
        grant(**roles, connection=session.connection())
        revoke(**roles, connection=session.connection())
        session.rollback()
    options = {"options": f"-csearch_path={PATH.replace(' ', '')}"}
    url = trapped_engine.url.update_query_dict(options).render_as_string(hide_password=False)
    for line in COMMANDS:
        told = CliRunner().invoke(main, ["--url", url, *line.format(id=job_id).split()])
        # What is wrong with a server of the tests, the doctor tells by 1.
        assert told.exit_code in ((0, 1) if line == "doctor" else (0,)), told.output

    assert paths == {PATH.replace(" ", "")}
    assert not is_stepped_on(plain_engine)


def test_the_connections_of_a_worker_alone_have_a_path_of_their_own(
    trapped_engine: Engine,
) -> None:
    for settings in (CLAIMING, UPKEEP):
        with own_connection(trapped_engine, settings) as connection:
            path = connection.exec_driver_sql("SHOW search_path").scalar_one()
            assert path == "pg_catalog, pg_temp"


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
        found = connection.execute(MEANT_BY_TABLES)
        assert [row for row in found if not row[1].startswith(OURS)] == []


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
