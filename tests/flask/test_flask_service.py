"""The example service with a worker process of its own, as it is deployed."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

pytestmark = pytest.mark.journey

EXAMPLE = Path(__file__).parents[2] / "examples" / "shop"
PATIENCE = 60.0


@dataclass(frozen=True)
class Service:
    """The example in a directory and on a database of its own."""

    directory: Path
    url: str
    engine: Engine

    def flask(self, *arguments: str) -> str:
        """What a command of ``flask`` prints; it must succeed."""
        done = subprocess.run(
            self._command(*arguments),
            cwd=self.directory,
            env=self._environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def worker(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """A worker process, which serves by now; its log is ``worker.log``."""
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                self._command("pgqueue", "worker", *options),
                cwd=self.directory,
                env=self._environment(),
                stderr=log,
            )
        try:
            until(lambda: "serving default" in self.log.read_text() or process.poll() is not None)
            yield process
        finally:
            process.kill()
            process.wait()

    @property
    def log(self) -> Path:
        return self.directory / "worker.log"

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(statement))]

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "flask", "--app", "shop", *arguments]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "DATABASE_URL": self.url}


@pytest.fixture
def service(tmp_path: Path, empty_database_url: str) -> Iterator[Service]:
    shutil.copy(EXAMPLE / "shop.py", tmp_path)
    engine = create_engine(empty_database_url)
    yield Service(tmp_path, empty_database_url, engine)
    engine.dispose()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def shop(service: Service, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the service, in the process of the test."""
    monkeypatch.setenv("DATABASE_URL", service.url)
    specification = importlib.util.spec_from_file_location("shop", service.directory / "shop.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "shop", module)
    specification.loader.exec_module(module)
    return module


@pytest.mark.timeout(300)
def test_an_order_gets_its_receipt_and_a_refused_one_leaves_nothing(
    service: Service, shop: Any
) -> None:
    service.flask("db", "init")
    assert "up to date: version" in service.flask("pgqueue", "upgrade")
    service.flask("db", "migrate", "-m", "orders and receipts")
    service.flask("db", "upgrade")
    client = shop.create_app().test_client()

    with service.worker() as worker:
        refused = client.post("/orders", json={"item": "a yacht", "cents": 99_900_000})
        placed = client.post("/orders", json={"item": "a book", "cents": 1250})
        until(lambda: service.rows("SELECT 1 FROM pgqueue.jobs WHERE outcome IS NOT NULL") != [])
        worker.send_signal(signal.SIGTERM)
        code = worker.wait(PATIENCE)

    assert (refused.status_code, placed.status_code, code) == (409, 201, 0)
    assert "has stopped" in service.log.read_text()
    assert service.rows("SELECT item, text FROM orders LEFT JOIN receipts ON order_id = id") == [
        ("a book", "a book: 12.50")
    ]
    assert service.rows("SELECT task, status FROM pgqueue.job_overview") == [
        ("shop.write_receipt", "succeeded")
    ]


def test_a_worker_writes_each_line_of_the_application_once(service: Service) -> None:
    with (service.directory / "shop.py").open("a") as module:
        module.write(
            "\n\n@queue.task\ndef greet():\n"
            "    from flask import current_app\n\n"
            "    current_app.logger.warning('good morning')\n"
        )
    service.flask("pgqueue", "upgrade")
    service.flask("pgqueue", "enqueue", "shop.greet")

    with service.worker("--until-empty") as worker:
        worker.wait(PATIENCE)

    assert service.log.read_text().count("good morning") == 1


def test_a_killed_worker_of_flask_loses_no_receipt(service: Service, shop: Any) -> None:
    """The receipt waits for a lock that the test holds, and its worker is killed there."""
    service.flask("pgqueue", "upgrade")
    app = shop.create_app()
    with app.app_context():
        shop.db.create_all()

    with service.engine.connect() as holder:
        holder.execute(text("LOCK TABLE receipts"))
        app.test_client().post("/orders", json={"item": "a pen", "cents": 200})
        waiting = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'receipts'::regclass"
        with service.worker():
            until(lambda: service.rows(waiting) != [])
    with service.worker():
        until(lambda: service.rows("SELECT text FROM receipts") == [("a pen: 2.00",)])

    with app.app_context():
        shop.db.engine.dispose()
