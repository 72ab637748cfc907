"""Two releases at once, and tables that are upgraded while jobs run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from sqlalchemy import text, true

from chaos.environment import Environment
from chaos.history import START
from chaos.mutations import Patch, mutation
from chaos.releases import one, two
from chaos.sample_tasks import call, pay
from chaos.scenario import Size, scenario
from chaos.workers import Workers
from pgqueue import PgQueue, schema
from pgqueue.errors import SchemaTooNew
from pgqueue.schema import state

CHECKOUT = Path(__file__).parent.parent.parent
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "alembic.ini", "alembic", "pgqueue")
NEXT = state.SCHEMA_VERSION + 1

NEXT_REVISION = f"""
import sqlalchemy as sa
from alembic import op

from pgqueue.models.base import SCHEMA

revision, down_revision = "pgqueue_{NEXT:04}", "pgqueue_{NEXT - 1:04}"


def upgrade():
    op.add_column("jobs", sa.Column("note", sa.Text), schema=SCHEMA)
    op.execute(f"UPDATE {{SCHEMA}}.schema_version SET version = {NEXT}")


def downgrade():
    op.drop_column("jobs", "note", schema=SCHEMA)
    op.execute(f"UPDATE {{SCHEMA}}.schema_version SET version = {NEXT - 1}")
"""
"""A column more in the table that all write to.  In one table: a transaction that locks several
waits for jobs that wait for it, and PostgreSQL ends the one or the other."""

PROGRAM = """
import sys
from datetime import timedelta
from pgqueue import PgQueue, PgQueueError, Worker
queue = PgQueue(sys.argv[1])
try:
    queue.upgrade() if sys.argv[2] == "upgrade" else Worker(queue).run_until_empty(timeout=5)
except PgQueueError as error:
    print(type(error).__name__)
"""


@mutation
def unknown_tasks_are_claimed(patch: Patch) -> None:
    """A worker claims messages of its queues whatever their task."""
    from sqlalchemy import and_

    from pgqueue.repository import claim
    from pgqueue.repository.tables import message_queue

    def of_pair(pair):  # type: ignore[no-untyped-def]
        return and_(
            message_queue.c.queue == pair.c.queue,
            message_queue.c.priority == pair.c.priority,
            true(),
        )

    patch.set(claim, "_of_pair", of_pair)
    patch.rebuild(claim.claim, claim.upcoming)


@mutation
def arguments_of_another_release_fail(patch: Patch) -> None:
    """A job fails in the first worker that cannot read its arguments."""
    from pgqueue.arguments import Payload
    from pgqueue.arguments.refusals import OtherVersion
    from pgqueue.errors import PayloadError

    real = Payload.loads

    def loads(self, text):  # type: ignore[no-untyped-def]
        try:
            return real(self, text)
        except OtherVersion as error:
            raise PayloadError(*error.args) from error

    patch.set(Payload, "loads", loads)


@mutation
def any_tables_will_do(patch: Patch) -> None:
    """A worker does not look at the version of the tables."""
    patch.set(schema, "verify", lambda _connection: None)


@mutation
def only_its_own_tables_will_do(patch: Patch) -> None:
    """A worker refuses tables that are newer than itself, although they still serve it."""

    def exactly(connection):  # type: ignore[no-untyped-def]
        if state.read_state(connection).version != state.SCHEMA_VERSION:
            raise SchemaTooNew("not mine")

    patch.set(schema, "verify", exactly)


@scenario(
    promises="P1 P6",
    full=Size(jobs=5000, workers=4),
    short=Size(jobs=300, workers=1),
    mutated={
        "unknown_tasks_are_claimed": "an old worker has ended|ended with 1|F[0-9]:",
        "arguments_of_another_release_fail": "has failed what it cannot read",
    },
)
def two_releases_at_once(environment: Environment, size: Size) -> None:
    """Old and new workers together: what only the new know waits for them, and nothing fails."""
    old, new = one(PgQueue(environment.engine)), two(PgQueue(environment.engine))
    greetings = [(f"{number}",) for number in range(size.jobs // 2)]
    before = environment.enqueue(old["greet"], greetings)
    unknown = environment.enqueue(new["wave"], greetings)
    titled = [(name, "Dr.") for (name,) in greetings]
    unreadable = environment.enqueue(new["greet"], titled)
    workers = environment.workers(size.workers, modules=["chaos.releases.one"], poll_interval=0.1)
    left = len(unknown) + len(unreadable)
    _until_left(environment, workers, left, unreadable=unreadable)
    started = {event.job for event in environment.history(START)}
    environment.expect(started >= set(before), "a job was passed by")
    environment.expect(
        not started & {*unknown, *unreadable}, "an old worker has run a job it does not know"
    )
    again = environment.enqueue(old["greet"], greetings)
    younger = environment.workers(size.workers, modules=["chaos.releases.two"])
    environment.until_started(*again)  # by either release
    workers.stop()
    environment.count("restarts", size.workers)
    environment.enqueue(new["greet"], titled)
    environment.finish(younger)
    environment.judge()


def _until_left(
    environment: Environment, workers: Workers, count: int, *, unreadable: list[int]
) -> None:
    """Until the old workers have run what they can, and have given back what they cannot read."""
    waiting = "SELECT count(*) FROM pgqueue.unreadable_jobs WHERE job_id = ANY(:jobs)"
    used = """
        SELECT count(*) FROM pgqueue.jobs
        WHERE id = ANY(:jobs) AND (attempts > 0 OR outcome IS NOT NULL)
    """

    def is_so() -> bool:
        alive = all(each.is_running for each in workers.members)
        environment.expect(alive, "an old worker has ended over what it does not know")
        failed = environment.scalar(used, jobs=unreadable)
        environment.expect(failed == 0, f"an old worker has failed what it cannot read: {failed}")
        met = environment.scalar(waiting, jobs=unreadable) == len(unreadable)
        return met and environment.unfinished() <= count

    environment.until(is_so, what="all that is known ends, and the rest is met")


@scenario(
    promises="P1 P12",
    full=Size(jobs=10_000, workers=4),
    short=Size(jobs=400, workers=1),
    mutated={
        "any_tables_will_do": "version it does not know",
        "only_its_own_tables_will_do": "still serve it",
    },
)
def tables_upgraded_under_load(environment: Environment, size: Size) -> None:
    """Upgraded under load, once killed half-way: the code before goes on; others are refused."""
    newer = _checkout_of_next_version(environment.directory / "next")
    said = _run(newer, environment.url, "work")
    environment.expect(
        said == "SchemaTooOld", f"newer code on older tables says {said or 'nothing'}"
    )
    workers = environment.workers(2 * size.workers, concurrency=2)
    for task in (pay, call):
        environment.enqueue(task.options(max_attempts=1), [(2,)] * (size.jobs // 4))
    _kill_an_upgrade(environment, newer)
    said = _run(newer, environment.url, "upgrade")
    environment.expect(said == "", f"the upgrade says {said}")
    version = environment.scalar("SELECT version FROM pgqueue.schema_version")
    environment.expect(version == NEXT, f"the tables have version {version}")
    environment.count("upgrades under load")
    for task in (pay, call):
        environment.enqueue(task.options(max_attempts=1), [(2,)] * (size.jobs // 4))
    late = environment.workers(1)
    environment.until(
        lambda: _is_working(environment, late),
        what="a worker starts on tables that still serve it",
    )
    environment.finish(workers, late)
    _refuses_unknown_tables(environment)
    environment.judge()


def _kill_an_upgrade(environment: Environment, newer: Path) -> None:
    """kill -9, when it has changed a table and not yet said so: nothing of it stays."""
    waits = (
        "SELECT pid FROM pg_locks"
        " WHERE NOT granted AND relation = 'pgqueue.schema_version'::regclass"
    )
    with environment.engine.begin() as connection:
        connection.execute(text("LOCK TABLE pgqueue.schema_version IN SHARE MODE"))
        upgrade = _start(newer, environment.url, "upgrade")
        environment.until(lambda: environment.rows(waits), what="the upgrade has changed a table")
        upgrade.kill()
        upgrade.communicate()
    environment.count("upgrades killed")
    column = "SELECT count(*) FROM information_schema.columns WHERE column_name = 'note'"
    environment.expect(environment.scalar(column) == 0, "a killed upgrade has left its column")
    version = environment.scalar("SELECT version FROM pgqueue.schema_version")
    environment.expect(version == NEXT - 1, f"a killed upgrade has left version {version}")


def _is_working(environment: Environment, workers: Workers) -> bool:
    [member] = workers.members
    environment.expect(member.is_running, "a worker refuses newer tables that still serve it")
    pids = environment.rows("SELECT pid FROM pgqueue.workers")
    return member.pid in {row[0] for row in pids}


def _refuses_unknown_tables(environment: Environment) -> None:
    environment.execute("UPDATE pgqueue.schema_version SET version = 999, oldest_code = 999")
    [member] = environment.workers(1).members
    environment.until(
        lambda: not member.is_running or "serving" in member.log.read_text(),
        what="the worker refuses or starts",
    )
    told = "SchemaTooNew" in member.log.read_text()
    words = "a worker has started on tables of a version it does not know"
    environment.expect(not member.is_running and told, words)
    change = f"UPDATE pgqueue.schema_version SET version = {NEXT}, oldest_code = {NEXT - 1}"
    environment.execute(change)


def _checkout_of_next_version(directory: Path) -> Path:
    """This code as it will be when the tables have one more revision."""
    directory.mkdir()
    for name in SHIPPED:
        source = CHECKOUT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, directory / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, directory / name)
    (directory / "alembic" / "versions" / f"{NEXT:04}_chaos.py").write_text(NEXT_REVISION)
    module = directory / "pgqueue" / "schema" / "state.py"
    before = module.read_text()
    ours = f"SCHEMA_VERSION = {NEXT - 1}\n"
    assert ours in before, "the line that says which version the code is written for"
    module.write_text(before.replace(ours, f"SCHEMA_VERSION = {NEXT}\n"))
    return directory


def _run(checkout: Path, url: str, what: str) -> str:
    """Run a program on another checkout's code; what it says."""
    program = _start(checkout, url, what)
    output, errors = program.communicate()
    return errors[-500:] if program.returncode != 0 else output.strip()


def _start(checkout: Path, url: str, what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, url, what],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
