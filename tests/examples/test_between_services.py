"""Enqueues by a trigger and by a program in Node, as their page shows them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from documents import ROOT
from sqlalchemy import Engine, text

from pgqueue import Limit, PgQueue, Unique, Worker

pytestmark = pytest.mark.journey

EXAMPLE = ROOT / "examples" / "between_services"


class Mailer:
    """The service that has the task."""

    def __init__(self, engine: Engine) -> None:
        self.welcomed: list[int] = []
        self.queue = PgQueue(engine)
        limit = Limit(1, by="user_id")
        self.queue.task(name="mail.welcome", unique=Unique(), limit=limit)(self._welcome)
        self.work()

    def _welcome(self, user_id: int) -> None:
        self.welcomed.append(user_id)

    def work(self) -> dict[str, int]:
        return Worker(self.queue).run_until_empty()


def test_a_new_row_enqueues_its_job(engine: Engine) -> None:
    mailer = Mailer(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql((EXAMPLE / "signup.sql").read_text("utf-8"))
        connection.execute(text("INSERT INTO users (email) VALUES ('ann'), ('bob')"))

    assert mailer.work() == {"succeeded": 2}
    assert sorted(mailer.welcomed) == [1, 2]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_program_in_node_enqueues(engine: Engine, tmp_path: Path) -> None:
    has_pg = subprocess.run(["node", "-e", "require('pg')"], capture_output=True, check=False)
    if has_pg.returncode != 0:
        pytest.skip("Node finds no package pg; name its folder in NODE_PATH")
    mailer = Mailer(engine)
    # An import finds packages beside the file only, and not in NODE_PATH.
    found = ["node", "-p", "require('path').resolve(require.resolve('pg/package.json'), '../..')"]
    packages = subprocess.run(found, capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "node_modules").symlink_to(packages)
    shutil.copy(EXAMPLE / "enqueue.mjs", tmp_path)
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)

    done = subprocess.run(
        ["node", "enqueue.mjs"],
        cwd=tmp_path,
        env={**os.environ, "DATABASE_URL": url},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert mailer.work() == {"succeeded": 1}
    assert mailer.welcomed == [10]
