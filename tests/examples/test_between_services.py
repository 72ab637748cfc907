"""Enqueues by a trigger and by a program in Node, as their page shows them."""

import shutil
from pathlib import Path

import pytest
from documents import ROOT
from node_programs import can_run_node, run_node
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


def test_a_program_in_node_enqueues(engine: Engine, tmp_path: Path) -> None:
    if not can_run_node(tmp_path):
        pytest.skip("no Node with its package pg; name the folder of the package in NODE_PATH")
    mailer = Mailer(engine)
    shutil.copy(EXAMPLE / "enqueue.mjs", tmp_path)

    run_node(tmp_path / "enqueue.mjs", engine.url)

    assert mailer.work() == {"succeeded": 1}
    assert mailer.welcomed == [10]
