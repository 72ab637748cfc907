"""``--nodes``: one command on every node, the sums, and the nodes that do not answer."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shop_rig import PATIENCE, command, environment, wait_until
from some_nodes import DOWN, number_of, numbered, put_citus
from sqlalchemy import create_engine, func, make_url, select, text
from sqlalchemy.orm import Session

from pgqueue import Job, Lease, PgQueue
from pgqueue.cli.nodes import chosen_nodes
from pgqueue.nodes import Node
from pgqueue.tables import WorkerProcess
from pgqueue.testing.databases import as_text, fresh_database


@pytest.fixture
def queue(node_urls: list[str]) -> PgQueue:
    """With one job on the first node, and two on the second."""
    queue = numbered(node_urls)
    add = queue.task(name="add")(lambda: None)
    for node, jobs in zip(queue.nodes, (1, 2, 0), strict=True):
        with queue.bound_to(node.url):
            for _ in range(jobs):
                add.delay()
    return queue


def document_of(queue: PgQueue, *words: str, code: int | None = 0) -> Any:
    ended = command(queue, *words, "--json")
    assert code in (None, ended.returncode), ended.stderr
    return json.loads(ended.stdout)


def test_upgrade_makes_and_numbers_the_tables_of_all_nodes(server_url: str) -> None:
    with fresh_database(server_url) as one, fresh_database(server_url) as two:
        queue = PgQueue(nodes=[one, two])

        ended = command(queue, "upgrade", "--nodes", "all")

        assert ended.returncode == 0
        first, second = queue.nodes
        lines = [line for line in ended.stdout.splitlines() if line]
        assert lines[::2] == [first.name, second.name]
        assert "are up to date" in lines[1]
        assert [number_of(first), number_of(second)] == [1, 2]


def test_status_shows_each_node_and_adds_up(queue: PgQueue) -> None:
    found = document_of(queue, "status", "--nodes", "all")
    shown = command(queue, "status", "--nodes", "all").stdout

    pending = [node["queues"][0]["jobs"]["pending"] for node in found["nodes"] if node["queues"]]
    assert [node["node"] for node in found["nodes"]] == [node.name for node in queue.nodes]
    assert pending == [1, 2]
    assert found["queues"][0]["jobs"]["pending"] == 3
    assert shown.index(queue.nodes[2].name) < shown.index("All nodes")
    assert shown.partition("All nodes")[2].splitlines()[2].split()[:3] == ["default", "3", "0"]


def test_the_jobs_of_one_node_are_listed_by_its_name(queue: PgQueue) -> None:
    second = queue.nodes[1]

    found = document_of(queue, "jobs", "--nodes", second.name)

    [node] = found["nodes"]
    assert node["node"] == second.name
    assert {int(job["id"]) >> 44 for job in node["jobs"]} == {2}


@pytest.mark.parametrize("words", ["status", "failures", "jobs", "upgrade", "doctor"])
def test_a_node_that_is_down_is_named_and_the_others_go_on(queue: PgQueue, words: str) -> None:
    up = queue.nodes[0]
    queue = PgQueue(nodes=[DOWN, up.url])

    ended = command(queue, words, "--nodes", "all")

    assert ended.returncode == 1
    assert "Error: 127.0.0.1:9/down: No connection to the database" in ended.stderr
    assert "hunter2" not in ended.stdout + ended.stderr
    assert len(ended.stdout.partition(up.name)[2].strip()) >= len("No errors.")


def test_the_document_names_a_node_that_is_down(queue: PgQueue) -> None:
    queue = PgQueue(nodes=[DOWN, queue.nodes[0].url])

    down, up = document_of(queue, "status", "--nodes", "all", code=1)["nodes"]

    assert down["node"] == "127.0.0.1:9/down"
    assert down["error"].startswith("No connection to the database")
    assert "queues" in up


@pytest.mark.parametrize(
    ("nodes", "words", "refusal"),
    [
        (["postgresql://n1/a", "postgresql://n2/a"], "n2,n3", "no 'n3'; the nodes are n1:5432/a"),
        (None, "all", "--nodes needs the nodes: in the app, PgQueue(nodes=[...])"),
    ],
)
def test_words_that_name_no_node_are_refused(
    nodes: list[str] | None, words: str, refusal: str
) -> None:
    ended = command(PgQueue("postgresql://n1/a", nodes=nodes), "-v", "status", "--nodes", words)

    assert ended.returncode == 2
    assert refusal in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_host_names_its_nodes() -> None:
    urls = ["postgresql://n1/a", "postgresql://n1/b", "postgresql:///a?host=n10:5432&host=n11:5433"]
    queue = PgQueue(nodes=urls)

    assert chosen_nodes(queue, "n1") == queue.nodes[:2]
    assert chosen_nodes(queue, "n10, n1:5432/a") == [queue.nodes[0], queue.nodes[2]]
    assert chosen_nodes(queue, "all") == queue.nodes


def test_the_worker_of_one_node_has_no_parent_that_would_start_it_again(queue: PgQueue) -> None:
    without_tasks = PgQueue(nodes=[node.url for node in queue.nodes])

    ended = command(without_tasks, "worker", "--nodes", queue.nodes[1].name)

    assert ended.returncode == 1
    assert "registers no tasks" in ended.stderr


class TestDoctor:
    def about_nodes(self, queue: PgQueue, code: int | None = None) -> list[tuple[str, str, str]]:
        # The code tells of all nodes, and a server for tests has fsync off.
        found = document_of(queue, "doctor", "--nodes", "all", code=code)
        return [(one["level"], one["subject"], one["detail"]) for one in found["findings"]]

    def test_the_doctor_shows_the_numbers_of_nodes(self, queue: PgQueue) -> None:
        one, two, three = (node.name for node in queue.nodes)

        assert self.about_nodes(queue) == [
            ("ok", "nodes", f"number and names of those with tables: 1 {one}, 2 {two}, 3 {three}")
        ]

    def test_the_doctor_finds_two_nodes_with_one_number_and_its_remedy_helps(
        self, queue: PgQueue, server_url: str
    ) -> None:
        first = queue.nodes[0]
        with fresh_database(server_url, template_url=as_text(first.url)) as copy:
            both = PgQueue(nodes=[first.url, copy])

            [(level, subject, detail), _] = self.about_nodes(both, 1)

            assert (level, subject) == ("wrong", "node numbers")
            assert f"{first.name} and {Node(make_url(copy)).name} have the number 1" in detail
            remedy = detail.partition("run ")[2].partition(", then")[0]
            engine = create_engine(copy)
            with engine.begin() as connection:
                connection.execute(text(remedy))
            assert command(both, "upgrade", "--nodes", "all").returncode == 0
            assert [level for level, *_ in self.about_nodes(both)] == ["ok"]
            engine.dispose()

    def test_the_doctor_finds_nodes_without_a_number_and_other_versions(
        self, queue: PgQueue, node_urls: list[str], server_url: str, template_url: str
    ) -> None:
        with fresh_database(server_url, template_url=template_url) as new:
            engine = create_engine(new)
            with engine.begin() as connection:
                connection.execute(text("UPDATE pgqueue.schema_version SET version = version + 1"))
            engine.dispose()
            nodes = PgQueue(nodes=[node_urls[0], new])

            found = self.about_nodes(nodes, 1)

        assert [(level, subject) for level, subject, _ in found] == [
            ("wrong", "node numbers"),
            ("warning", "node versions"),
            ("ok", "nodes"),
        ]
        assert "ids of new jobs do not name the node; run pgqueue upgrade" in found[0][2]

    def test_the_doctor_takes_the_number_of_a_coordinator_for_one(self, database_url: str) -> None:
        engine = create_engine(database_url)
        put_citus(engine, 0)

        found = self.about_nodes(PgQueue(nodes=[database_url]))

        assert [level for level, *_ in found] == ["ok"]


SHOP = """
import os, pathlib, time
from pgqueue import PgQueue

queue = PgQueue(nodes=os.environ["SHOP_NODES"].split())


@queue.task
def wait_for_file(path: str) -> None:
    while not pathlib.Path(path).exists():
        time.sleep(0.01)
"""


@pytest.mark.journey
def test_a_worker_of_all_nodes_runs_their_jobs_and_ends_after_sigterm(
    node_urls: list[str], tmp_path: Path
) -> None:
    numbered(node_urls)
    (tmp_path / "nodes_shop.py").write_text(SHOP)
    task = PgQueue().task(name="nodes_shop.wait_for_file")(wait_for_file)
    engines = [create_engine(url) for url in node_urls]
    for engine in engines:
        with Session(engine) as session, session.begin():
            task.enqueue(session, str(tmp_path / "go"))
    words = ["-m", "pgqueue", "--app", "nodes_shop", "worker", "--nodes", "all"]
    worker = subprocess.Popen(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment(None) | {"SHOP_NODES": " ".join(node_urls)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: all(counted(engine, Lease) == 1 for engine in engines))
        assert [counted(engine, WorkerProcess) for engine in engines] == [1, 1, 1]

        worker.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        _, lines = worker.communicate(timeout=PATIENCE)
    finally:
        worker.kill()
        worker.communicate()

    assert worker.returncode == 0
    for engine in engines:
        with Session(engine) as session:
            assert [job.status.value for job in session.scalars(select(Job))] == ["succeeded"]
        assert f"works on node {Node(engine.url).name}" in lines
        assert counted(engine, WorkerProcess) == 0
        engine.dispose()


def wait_for_file(path: str) -> None: ...


def counted(engine: Any, model: Any) -> int:
    with Session(engine) as session:
        return session.scalar(select(func.count()).select_from(model)) or 0
