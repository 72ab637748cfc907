"""Where Citus is: what is asked of its catalog, and what is set, on a stand-in for its tables.

`make citus` runs on Citus itself.
"""

from typing import Any

import pytest
from click.testing import CliRunner
from hosts import host_revision
from some_nodes import DOWN, put_citus
from sqlalchemy import Engine, create_engine, event, text

from pgqueue import Node, PgQueue, PgQueueError, SchemaError
from pgqueue.cli import main
from pgqueue.repository.nodes import read_number
from pgqueue.schema import SCHEMA_VERSION, upgrade, upgrade_database, verify
from pgqueue.testing.databases import as_text
from pgqueue.views.findings import Finding, Level, of_nodes

PROPAGATION = text("SELECT current_setting('citus.enable_ddl_propagation')")
SHARDING = text("SELECT current_setting('citus.enable_schema_based_sharding')")


def test_the_nodes_are_those_that_citus_knows(engine: Engine) -> None:
    put_citus(engine, 0, (0, "c", 5600), (2, "w2", 5602))
    url = as_text(engine.url.set(password="hunter2"))

    nodes = PgQueue(url, nodes="citus").nodes

    database = engine.url.database
    assert [(node.number, node.name) for node in nodes] == [
        (0, f"c:5600/{database}"),
        (2, f"w2:5602/{database}"),
    ]
    assert nodes[1].url.password == "hunter2"


def test_a_coordinator_without_an_address_is_a_node_too(engine: Engine) -> None:
    put_citus(engine, 0, (1, "w1", 5601))

    nodes = PgQueue(engine, nodes="citus").nodes

    assert [node.number for node in nodes] == [0, 1]
    assert nodes[0].url == engine.url


def test_a_node_that_citus_has_disabled_is_not_skipped(engine: Engine) -> None:
    put_citus(engine, 0, (0, "c", 5600), (1, "w1", 5601))
    with engine.begin() as connection:
        connection.execute(text("UPDATE pg_dist_node SET isactive = groupid = 0"))

    assert [node.number for node in PgQueue(engine, nodes="citus").nodes] == [0, 1]


def test_a_command_needs_only_the_url_of_one_node(engine: Engine, database_url: str) -> None:
    put_citus(engine, 0)

    ended = CliRunner().invoke(main, ["--url", database_url, "upgrade", "--nodes", "all"])

    assert ended.exit_code == 0
    assert ended.stdout.startswith(Node(engine.url).name)


def test_doctor_says_which_nodes_may_lose_the_job_of_a_row(engine: Engine) -> None:
    put_citus(engine, 0, (1, "w1", 5601))

    def found() -> list[Finding]:
        return [each for each in of_nodes([Node(engine.url)]) if each.subject == "citus"]

    [finding] = found()
    assert finding.level is Level.WRONG
    assert "may keep an application's row" in finding.detail

    upgrade_database(engine)
    assert found() == []
    for lost in ("FUNCTION pgqueue_citus.enqueue_text", "TABLE pgqueue_citus.two_phase"):
        with engine.begin() as connection:
            connection.execute(text(f"DROP {lost}"))
        assert len(found()) == 1
        upgrade_database(engine)
        assert found() == []


def test_all_roles_may_enqueue_by_key_whatever_the_default_privileges(engine: Engine) -> None:
    put_citus(engine, 0, (1, "w1", 5601))
    with engine.begin() as connection:
        connection.execute(text("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC"))

    upgrade_database(engine)

    granted = text(
        "SELECT privilege_type FROM pg_proc, aclexplode(proacl) WHERE grantee = 0"
        " AND pg_proc.oid = 'pgqueue_citus.enqueue_uuid(uuid, jsonb)'::regprocedure"
    )
    with engine.connect() as connection:
        assert connection.scalars(granted).all() == ["EXECUTE"]


def test_a_later_upgrade_of_the_coordinator_needs_no_right_to_create_schemas(
    empty_engine: Engine,
) -> None:
    put_citus(empty_engine, 0, (1, "w1", 5601))
    role, database = f"owner_of_{empty_engine.url.database}", empty_engine.url.database
    of_owner = create_engine(empty_engine.url, connect_args={"options": f"-c role={role}"})
    with empty_engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role}"))
    try:
        with empty_engine.begin() as connection:
            connection.execute(text(f"GRANT CREATE ON DATABASE {database} TO {role}"))
        upgrade_database(of_owner)
        with empty_engine.begin() as connection:
            connection.execute(text(f"REVOKE CREATE ON DATABASE {database} FROM {role}"))

        upgrade_database(of_owner)
    finally:
        of_owner.dispose()
        with empty_engine.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role} CASCADE"))
            connection.execute(text(f"DROP ROLE {role}"))


def test_a_coordinator_without_other_nodes_needs_nothing_more(engine: Engine) -> None:
    put_citus(engine, 0)
    upgrade_database(engine)

    assert [each.level for each in of_nodes([Node(engine.url)])] == [Level.OK]


def test_without_citus_its_nodes_are_refused_with_the_way_out(engine: Engine) -> None:
    with pytest.raises(PgQueueError, match=r"no Citus.*give PgQueue\(nodes="):
        PgQueue(engine, nodes="citus").nodes  # asks the database


@pytest.mark.parametrize("group", [0, 5])
@pytest.mark.parametrize("is_in_list", [False, True])
def test_the_number_is_that_of_the_group_also_in_a_list(
    empty_engine: Engine, group: int, is_in_list: bool
) -> None:
    put_citus(empty_engine, group)
    nodes = [DOWN, as_text(empty_engine.url)] if is_in_list else "citus"

    PgQueue(empty_engine, nodes=nodes).upgrade()

    with empty_engine.connect() as connection:
        assert read_number(connection) == group


def test_a_group_whose_ids_javascript_cannot_read_is_refused(empty_engine: Engine) -> None:
    put_citus(empty_engine, 512)

    with pytest.raises(SchemaError, match=r"number 512, and 511 is the highest.*setval"):
        upgrade_database(empty_engine)


def test_a_revision_of_a_host_numbers_the_node_and_gets_its_settings_back(
    empty_engine: Engine,
) -> None:
    put_citus(empty_engine, 3)

    with empty_engine.begin() as connection, host_revision(connection):
        upgrade(to=SCHEMA_VERSION)

        assert connection.scalar(PROPAGATION) == connection.scalar(SHARDING) == "on"
        assert read_number(connection) == 3


@pytest.mark.parametrize("by_host", [False, True])
def test_tables_are_created_and_changed_without_propagation(
    empty_engine: Engine, by_host: bool
) -> None:
    put_citus(empty_engine, 1)
    seen: set[tuple[str, str]] = set()

    @event.listens_for(empty_engine, "before_cursor_execute")
    def look(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.lstrip().startswith(("CREATE", "ALTER TABLE")):
            connection = cursor.connection
            with connection.cursor() as own:
                own.execute(f"{PROPAGATION.text}, ({SHARDING.text})")
                seen.add(own.fetchone())

    if by_host:
        with empty_engine.begin() as connection, host_revision(connection):
            upgrade(to=SCHEMA_VERSION)
    else:
        upgrade_database(empty_engine)

    assert seen == {("off", "off")}


def test_distributed_tables_are_refused_with_both_ways_out(engine: Engine) -> None:
    put_citus(engine, 0)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO pg_dist_partition VALUES ('pgqueue.jobs')"))

        with pytest.raises(SchemaError) as refusal:
            verify(connection)

    assert "undistribute_table('pgqueue.jobs')" in str(refusal.value)
    assert "another PGQUEUE_SCHEMA" in str(refusal.value)
