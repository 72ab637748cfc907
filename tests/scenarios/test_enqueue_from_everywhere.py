"""Python, SQL and Node enqueue at once, while workers are killed.

Node takes part if it finds its package pg, whose folder ``NODE_PATH`` names.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from node_programs import can_run_node, run_node
from sqlalchemy import Connection, Engine, text
from tasks_of_everybody import in_turn, once, queue

from chaos.interleavings.logical_workers import violations
from chaos.workers import wait_until
from pgqueue import Worker

pytestmark = pytest.mark.journey

NUMBERS = 60
KEYS = 3
KILLS = 4
IN_SQL = text(
    "SELECT pgqueue.enqueue(:task, jsonb_build_object(CAST(:name AS text), CAST(:value AS int)))"
)
IN_NODE = f"""
    import pg from "pg";
    const client = new pg.Client({{ connectionString: process.env.DATABASE_URL }});
    await client.connect();
    for (let number = 0; number < {NUMBERS}; number++) {{
      await client.query("BEGIN");
      const enqueue = "SELECT pgqueue.enqueue($1, $2)";
      await client.query(enqueue, ["in_turn", JSON.stringify({{ key: number % {KEYS} }})]);
      await client.query(enqueue, ["once", JSON.stringify({{ number }})]);
      await client.query("COMMIT");
    }}
    await client.end();
"""


def in_python(connection: Connection, number: int) -> None:
    in_turn.enqueue(connection, number % KEYS)
    once.enqueue(connection, number)


def in_sql(connection: Connection, number: int) -> None:
    for task, name, value in (("in_turn", "key", number % KEYS), ("once", "number", number)):
        connection.execute(IN_SQL, {"task": task, "name": name, "value": value})


def test_limits_and_unique_keys_hold_for_all_of_them_under_kills(
    engine: Engine, tmp_path: Path
) -> None:
    url = engine.url.render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE met (key int)"))
    queue.bind(engine)
    Worker(queue).run_until_empty()  # declares the tasks

    def enqueue_all(enqueue: Callable[[Connection, int], None]) -> None:
        for number in range(NUMBERS):
            with engine.begin() as connection:
                enqueue(connection, number)

    def start_worker() -> "subprocess.Popen[bytes]":
        app = ["--app", "tasks_of_everybody:queue"]
        return subprocess.Popen(
            [sys.executable, "-m", "pgqueue", *app, "worker", "--concurrency", "4"],
            env={
                **os.environ,
                "TASKS_DATABASE": url,
                "PYTHONPATH": str(Path(__file__).parents[1] / "helpers"),
            },
        )

    def count(condition: str) -> int:
        with engine.connect() as connection:
            found: int = connection.execute(text(f"SELECT count(*) FROM {condition}")).scalar_one()
            return found

    workers = [start_worker() for _ in range(2)]
    try:
        with ThreadPoolExecutor() as clients:
            enqueuing = [clients.submit(enqueue_all, each) for each in (in_python, in_sql)]
            if can_run_node(tmp_path):
                program = tmp_path / "enqueue.mjs"
                program.write_text(IN_NODE)
                enqueuing.append(clients.submit(run_node, program, engine.url))
            for number in range(KILLS):
                attempts = count("pgqueue.jobs WHERE outcome IS NOT NULL")
                wait_until(
                    lambda: (
                        count("pgqueue.jobs WHERE outcome IS NOT NULL") > attempts
                        and count("pgqueue.leases")
                    ),
                    what="a job has ended and another runs",
                )
                killed = workers.pop(0)
                killed.kill()
                killed.wait()
                workers.append(start_worker())
            for each in enqueuing:
                each.result()
        wait_until(lambda: count("pgqueue.jobs WHERE outcome IS NULL") == 0, what="all jobs end")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()

    assert count("met") == 0
    assert count("pgqueue.jobs WHERE outcome <> 'succeeded'") == 0
    assert count("pgqueue.jobs WHERE task = 'once'") == NUMBERS
    assert count("pgqueue.jobs WHERE task = 'in_turn'") == NUMBERS * len(enqueuing)
    assert violations(engine) == []
