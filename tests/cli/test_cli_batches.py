"""``pgqueue batches``."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from shop_rig import pgqueue
from sqlalchemy import Engine

from pgqueue import PgQueue, Worker

APPLICATION = """
import os
from pgqueue import PgQueue

queue = PgQueue(os.environ.get("SHOP_DATABASE"))
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "mails.py").write_text(APPLICATION)
    return tmp_path


def printed(app: Path, url: str, *arguments: str) -> str:
    ended = pgqueue(app, "--app", "mails:queue", "batches", *arguments, database_url=url)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_batches_are_listed_with_their_progress(
    engine: Engine, database_url: str, app: Path
) -> None:
    assert printed(app, database_url) == "There are no batches.\n"
    queue = PgQueue(engine)
    mail = queue.task(name="mail")(lambda: None)
    with queue.session() as session, session.begin():
        with queue.batch(session, "issue 11", meta={"issue": 11}):
            mail.enqueue(session)
        with queue.batch(session, "issue 12"):
            mail.enqueue(session)
            mail.options(delay=timedelta(hours=1)).enqueue(session)
    Worker(queue).run_until_empty(timeout=60)

    lines = printed(app, database_url).splitlines()
    assert lines[0].split() == ["batch", "name", "outcome", "ended", "failed", "cancelled"]
    assert "issue 12" in lines[1]
    assert "open" in lines[1]
    assert "1 of 2" in lines[1]
    [newest] = json.loads(printed(app, database_url, "--limit", "1", "--json"))["batches"]
    assert (newest["name"], newest["outcome"], newest["ended"]) == ("issue 12", None, 1)
    both = json.loads(printed(app, database_url, "--json"))["batches"]
    assert [each["meta"] for each in both] == [{}, {"issue": 11}]
