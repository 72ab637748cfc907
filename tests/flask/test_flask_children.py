"""Handlers of Flask applications in processes of their own find their app there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

pytestmark = pytest.mark.journey

APP = """
import os
import threading

from flask import Flask, current_app
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import text
from sqlalchemy.orm import DeclarativeBase

from pgqueue.flask import PgQueue


class Base(DeclarativeBase): ...


db = SQLAlchemy(model_class=Base)
queue = PgQueue()


def make_app() -> Flask:
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["SHOP_URL"]
    app.config["FRUIT"] = "pear"
    db.init_app(app)
    queue.init_app(app, db)
    return app


def is_worker() -> bool:
    return "pgqueue-heartbeat" in {thread.name for thread in threading.enumerate()}


@queue.task(executor="process", max_attempts=1)
def shelve(number: int) -> list[object]:
    words = [current_app.config["FRUIT"], is_worker()]
    with queue.session() as session:
        words.append(session.scalar(text("SELECT 1")))
    return [*words, db.session.scalar(text("SELECT 2"))]
"""

GROUP = """
from flask.cli import FlaskGroup
from shop import make_app

FlaskGroup(create_app=make_app)()
"""


@pytest.mark.parametrize(
    "command", [["-m", "flask", "--app", "shop:make_app"], ["manage.py"]], ids=["flask", "group"]
)
def test_a_handler_in_a_child_runs_in_an_application_context(
    database_url: str, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "manage.py").write_text(GROUP)
    environment = {**os.environ, "SHOP_URL": database_url}
    enqueue = "import shop; a = shop.make_app(); a.app_context().push(); shop.shelve.delay(1)"

    for arguments in (["-c", enqueue], [*command, "pgqueue", "worker", "--until-empty"]):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    engine = create_engine(database_url)
    with engine.connect() as connection:
        job = connection.execute(text("SELECT result, last_error FROM pgqueue.jobs")).one()
    engine.dispose()
    assert tuple(job) == (["pear", False, 1, 2], None)
