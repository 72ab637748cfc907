"""``worker --log-format json``: one JSON document a line, masked as the other form is."""

import io
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shop_rig import PATIENCE, enqueue, pgqueue, write_shop
from sqlalchemy import Engine

from pgqueue import redaction
from pgqueue.cli.json_lines import JsonLines


def of_logger(log: Any) -> dict[str, Any]:
    """The line of what a logger of pgqueue logs."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("pgqueue.tests.json")
    logger.addHandler(handler)
    try:
        log(redaction.logger("pgqueue.tests.json"))
    finally:
        logger.removeHandler(handler)
    line: dict[str, Any] = json.loads(written.getvalue())
    return line


def test_a_line_has_the_fields_of_its_record() -> None:
    fields = {"job_id": 7, "meta": {"tenant": "acme"}}

    line = of_logger(lambda logger: logger.warning("job %d", 7, extra=fields))

    timestamp = line.pop("timestamp")
    assert timestamp.endswith("+00:00")
    assert line == {
        "level": "WARNING",
        "logger": "pgqueue.tests.json",
        "message": "job 7",
        **fields,
    }


def test_a_number_that_json_has_not_is_null() -> None:
    fields = {"rate": math.nan, "meta": {"range": [-math.inf, math.inf], "word": "NaN"}}

    line = of_logger(lambda logger: logger.warning("measured", extra=fields))

    assert (line["rate"], line["meta"]) == (None, {"range": [None, None], "word": "NaN"})


def test_an_exception_is_written_as_masked_text() -> None:
    def log(logger: redaction.Log) -> None:
        try:
            raise ValueError("postgresql://me:hidden@host/db is away")
        except ValueError:
            logger.exception("no connection", extra={"meta": {"at": "redis://me:hidden@host"}})

    line = of_logger(log)

    assert line["exception"].startswith("Traceback (most recent call last)")
    assert "postgresql://me:***@host/db is away" in line["exception"]
    assert "hidden" not in str(line)


@pytest.mark.journey
class TestCommand:
    @pytest.fixture
    def shop(self, tmp_path: Path) -> Path:
        return write_shop(tmp_path)

    def run(self, shop: Path, database_url: str) -> Any:
        options = ("--until-empty", "--log-jobs", "info", "--log-format", "json")
        return pgqueue(shop, "--app", "shop:queue", "worker", *options, database_url=database_url)

    def test_every_line_of_a_worker_is_json(
        self, shop: Path, engine: Engine, database_url: str
    ) -> None:
        enqueue(engine, shop, "add", (1, 2))

        ended = self.run(shop, database_url)

        lines = [json.loads(line) for line in ended.stderr.splitlines()]
        [job] = [line for line in lines if "job_id" in line]
        assert (job["task"], job["outcome"], job["meta"]) == ("shop.add", "succeeded", {})
        assert 0 < job["ran"] < PATIENCE

    def test_the_root_handler_of_an_application_replaces_that_of_the_command(
        self, shop: Path, engine: Engine, database_url: str
    ) -> None:
        enqueue(engine, shop, "add", (1, 2))
        with (shop / "shop.py").open("a") as application:
            application.write(OWN_LOGGING)

        ended = self.run(shop, database_url)

        lines = ended.stderr.splitlines()
        assert any(line.startswith("OURS job ") for line in lines)
        assert not any(line.startswith("{") and "job_id" in line for line in lines)
        assert any(line.startswith("OURS --log-format has no effect") for line in lines)

    def test_a_null_handler_of_a_library_does_not_silence_the_worker(
        self, shop: Path, engine: Engine, database_url: str
    ) -> None:
        enqueue(engine, shop, "add", (1, 2))
        program = (
            "import logging; logging.getLogger().addHandler(logging.NullHandler());"
            "from pgqueue.cli import main;"
            "main(['--app', 'shop:queue', 'worker', '--until-empty', '--log-jobs', 'info'])"
        )
        variables = os.environ | {"PGQUEUE_URL": database_url, "PYTHONPATH": str(shop)}

        ended = subprocess.run(
            [sys.executable, "-c", program],
            cwd=shop,
            env=variables,
            capture_output=True,
            text=True,
        )

        assert "shop.add succeeded" in ended.stderr

    def test_without_the_extra_the_command_says_what_to_install(
        self, shop: Path, database_url: str
    ) -> None:
        (shop / "pythonjsonlogger.py").write_text("raise ImportError('not installed')")

        ended = self.run(shop, database_url)

        assert ended.returncode == 1
        assert "pip install 'sqlalchemy-pgqueue[json]'" in ended.stderr


OWN_LOGGING = """
import logging.config

logging.config.dictConfig({
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"ours": {"format": "OURS %(message)s"}},
    "handlers": {"ours": {"class": "logging.StreamHandler", "formatter": "ours"}},
    "root": {"level": "INFO", "handlers": ["ours"]},
})
"""
