"""One secret is put into everything that can hold one, and nothing anybody reads shows it."""

import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from shop_rig import environment, pgqueue
from sqlalchemy import Engine, inspect, make_url, text

pytestmark = pytest.mark.journey

CANARY = "c4n4ry-S3cr3t"

APP = """
    import os

    from sqlalchemy import text
    from sqlalchemy.orm import Session

    from pgqueue import Discard, PgQueue, Retry, Secret

    queue = PgQueue(os.environ["SHOP_DATABASE"])
    never = {"retry": Retry.never()}
    once = {**never, "secret_args": ("token",)}


    @queue.task(**once)
    def chained(token: str) -> None:
        local = token
        try:
            {}[local]
        except KeyError as error:
            raise ValueError(f"the gateway refuses {token}") from error


    @queue.task(**never)
    def sent_to_the_database(session: Session, token: Secret[str]) -> None:
        session.execute(text("SELECT 1 / (length(:token) - length(:token))"), {"token": token})


    @queue.task(**once)
    def discarded(token: str) -> Discard:
        return Discard(f"no use for {token}")


    @queue.task(**once)
    def returned(token: str) -> dict:
        return {"access_token": token, "text": f"it was {token}"}


    @queue.task(retry=Retry.never())
    def unreachable() -> None:
        raise RuntimeError(f"cannot reach {os.environ['SHOP_DATABASE']}")


    @queue.task(**once)
    async def kept(token: str) -> None:
        raise ExceptionGroup("two", [ValueError(token), OSError(token)])


    @queue.task(executor="process", **never)
    def in_a_child(token: Secret[str]) -> None:
        raise ValueError(f"told by another process: {token}")


    def enqueue_all():
        for task in list(queue.tasks.values()):
            arguments = () if task is unreachable else (os.environ["CANARY"],)
            task.options(unique_key=f"{task.name} x").delay(*arguments)
"""

LOOK = """
    import sys

    from pgqueue.cli import main

    for words in sys.argv[1:]:
        try:
            main(["--app", "shop:queue", *words.split()], standalone_mode=False)
        except SystemExit:
            pass
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(textwrap.dedent(APP))
    (tmp_path / "look.py").write_text(textwrap.dedent(LOOK))
    return tmp_path


@pytest.fixture
def secret_url(engine: Engine) -> Iterator[str]:
    """A database whose password is the secret."""
    role = f"canary_{uuid.uuid4().hex[:8]}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN SUPERUSER PASSWORD '{CANARY}'"))
    url = make_url(engine.url).set(username=role, password=CANARY)
    yield url.render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.execute(text(f"DROP ROLE {role}"))


def run(shop: Path, url: str, *command: str) -> str:
    """Everything that a program has printed."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=shop,
        env=environment(url) | {"CANARY": CANARY},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    return done.stdout


def stored(engine: Engine) -> str:
    """All rows of all tables, but for what the handlers need and what they have returned."""
    found: list[str] = []
    with engine.connect() as connection:
        for table in inspect(connection).get_table_names(schema="pgqueue"):
            row = "to_jsonb(one)" + (" - 'args' - 'result'" if table == "jobs" else "")
            found += connection.scalars(text(f"SELECT ({row})::text FROM pgqueue.{table} AS one"))
    return "\n".join(found)


def test_a_secret_is_seen_nowhere(shop: Path, engine: Engine, secret_url: str) -> None:
    run(shop, secret_url, "-c", "import shop; shop.enqueue_all()")
    worker = ["-m", "pgqueue", "--app", "shop:queue", "worker", "--until-empty"]

    log = run(shop, secret_url, *worker, "-v")
    with engine.connect() as connection:
        ids = connection.scalars(text("SELECT id FROM pgqueue.jobs")).all()
        held = connection.scalars(text("SELECT args::text FROM pgqueue.jobs")).all()
    shown = [f"jobs {id} {option}" for id in ids for option in ("", "--json")]
    looks = ["jobs", "jobs --json", *shown, "status", "status --json", "doctor", "doctor --json"]
    looks += ["failures", "failures --json", "stats"]
    output = run(shop, secret_url, "look.py", *looks)

    assert len(held) == 7
    assert sum(CANARY in args for args in held) == 6  # the handlers need it
    assert log.count("has failed") == 6
    assert CANARY not in log
    assert CANARY not in stored(engine)
    assert output.count("ZeroDivisionError") + output.count("DivisionByZero") > 0
    assert '"token": "***"' in output
    assert '"access_token": "***"' in output
    assert CANARY not in output


def test_a_refused_password_is_not_shown(shop: Path, secret_url: str) -> None:
    wrong = make_url(secret_url).set(database="nowhere").render_as_string(hide_password=False)

    ended = pgqueue(shop, "--url", wrong, "-v", "doctor")

    assert ended.returncode == 1
    assert 'database "nowhere" does not exist' in ended.stderr
    assert CANARY not in ended.stderr + ended.stdout
