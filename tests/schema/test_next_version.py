"""The day there is one more revision: both histories take the step, and code of both versions
works on the tables."""

from pathlib import Path

import pytest
from catalog import facts
from checkouts import NEXT, NOW, checkout_of_next_version, run_program
from hosts import Host, alembic_host
from sqlalchemy import Engine, create_engine, select, text

from pgqueue.models import SchemaVersion
from pgqueue.schema import upgrade_database, verify, write_revision

pytestmark = pytest.mark.journey

BEGIN = """
import io, sys
from hosts import host_revision, offline_revision
from pgqueue.errors import PgQueueError
from pgqueue.schema import downgrade, upgrade, upgrade_database, verify, write_revision
from sqlalchemy import create_engine, text

engine = create_engine(sys.argv[1])

def refusal(call):
    try:
        call()
    except PgQueueError as error:
        return f"{type(error).__name__}: {error}"

def version():
    with engine.connect() as connection:
        return connection.scalar(text("SELECT version FROM pgqueue.schema_version"))
"""


@pytest.fixture(scope="module")
def next_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout_of_next_version(tmp_path_factory.mktemp("next") / "checkout")


def test_our_history_takes_the_step_and_older_code_works_on(
    next_version: Path, engine: Engine
) -> None:
    program = f"{BEGIN}upgrade_database(engine); print(version())"

    output = run_program(program, url_of(engine), path=next_version)

    assert output == f"{NEXT}\n"
    upgrade_database(engine)
    with engine.connect() as connection:
        verify(connection)
        history = connection.scalars(text("SELECT version_num FROM pgqueue.alembic_version"))
        assert history.all() == [f"pgqueue_{NEXT:04}"]


def test_a_host_revision_takes_over_in_the_middle_of_our_history(
    next_version: Path, engine: Engine
) -> None:
    program = f"""{BEGIN}
with engine.begin() as connection, host_revision(connection):
    upgrade(to={NEXT}, base=0)
print(version(), refusal(lambda: upgrade_database(engine)))
"""

    assert run_program(program, url_of(engine), path=next_version) == f"{NEXT} None\n"


def test_a_host_takes_the_step_by_a_second_revision(
    next_version: Path, tmp_path: Path, empty_database_url: str, database_url: str
) -> None:
    host = alembic_host(tmp_path / "shop", empty_database_url)
    host.write_models("")
    write_revision(host.migrations)
    host.run("upgrade", "head")

    write_second = f"{BEGIN}print(write_revision({str(host.migrations)!r}))"
    second = run_program(write_second, host.url, path=next_version).splitlines()[-1]
    assert f"pgqueue.schema.upgrade(to={NEXT}, base={NOW})" in Path(second).read_text()
    assert f"pgqueue.schema.downgrade(to={NOW}, base={NEXT})" in Path(second).read_text()

    run_on(next_version, host, "upgrade", "head")
    assert version_in(host.url) == NEXT

    run_on(next_version, host, "downgrade", "-1")
    assert facts(host.url) == facts(database_url)


def test_a_host_that_has_not_taken_the_step_is_told_the_line_to_write(
    next_version: Path, engine: Engine
) -> None:
    program = f"""{BEGIN}
with engine.begin() as connection:
    connection.execute(text("DROP TABLE pgqueue.alembic_version"))
    print(refusal(lambda: verify(connection)))
print(refusal(lambda: upgrade_database(engine)))
"""

    by_verify, by_upgrade = run_program(program, url_of(engine), path=next_version).splitlines()

    assert by_verify.startswith("SchemaTooOld")
    assert by_upgrade.startswith("SchemaTooOld")
    assert f"`pgqueue.schema.upgrade(to={NEXT}, base={NOW})`" in by_verify
    assert f"`pgqueue.schema.upgrade(to={NEXT}, base={NOW})`" in by_upgrade


def test_offline_several_steps_need_to_be_told_where_they_begin(next_version: Path) -> None:
    program = f"""{BEGIN}
with offline_revision(io.StringIO()):
    print(refusal(lambda: upgrade(to={NEXT})))
    print(refusal(lambda: downgrade(to=0)))
    print(refusal(lambda: upgrade(to=1)))
    print(refusal(lambda: downgrade(to={NOW})))
"""

    up, down, one_up, one_down = run_program(
        program, "postgresql+psycopg:///none", path=next_version
    ).splitlines()

    assert f"say pgqueue.schema.upgrade(to={NEXT}, base=...)" in up
    assert "say pgqueue.schema.downgrade(to=0, base=...)" in down
    assert (one_up, one_down) == ("None", "None")


def test_offline_steps_begin_where_they_are_told(next_version: Path, engine: Engine) -> None:
    program = f"""{BEGIN}
for steps in (lambda: upgrade(to={NEXT}, base={NOW}), lambda: downgrade(to=0, base={NEXT})):
    script = io.StringIO()
    with offline_revision(script):
        steps()
    with engine.begin() as connection:
        connection.exec_driver_sql(script.getvalue())
        print(connection.scalar(text("SELECT to_regclass('pgqueue.queues')")))
"""

    assert run_program(program, url_of(engine), path=next_version) == "pgqueue.queues\nNone\n"


def run_on(checkout: Path, host: Host, *arguments: str) -> None:
    host.run(*arguments, PYTHONPATH=str(checkout))


def url_of(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


def version_in(url: str) -> int | None:
    engine = create_engine(url)
    with engine.connect() as connection:
        version = connection.scalar(select(SchemaVersion.version))
    engine.dispose()
    return version
