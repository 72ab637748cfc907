"""``pgqueue workers`` and ``pgqueue quiet``."""

import json
from pathlib import Path
from uuid import uuid4

from click.testing import CliRunner
from shop_rig import pgqueue
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from pgqueue import WorkerProcess
from pgqueue.cli import main


def test_workers_are_listed_and_made_quiet_by_id(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    first, second = uuid4(), uuid4()
    with Session(engine) as session, session.begin():
        for id in (first, second):
            process = {"hostname": "here", "pid": 1, "backend_pid": 1, "queues": ["mail", "web"]}
            session.add(WorkerProcess(id=id, slots=4, **process))
            session.flush()  # in this order

    def run(*words: str) -> tuple[int, str, str]:
        ended = pgqueue(tmp_path, "--url", database_url, *words)
        return ended.returncode, ended.stdout, ended.stderr

    assert run("quiet", str(first))[:2] == (0, f"{first}: quiet\n")
    code, said, errors = run("quiet", "--json", str(uuid4()), str(second))
    assert (code, [one["is_quiet"] for one in json.loads(said)["workers"]]) == (1, [False, True])
    with Session(engine) as session, session.begin():
        session.get_one(WorkerProcess, second).queues = ["mail", "web"]

    lines = run("workers")[1].splitlines()
    assert [line.split()[:3] for line in lines[-2:]] == [
        [str(first), "here:1", "(quiet)"],
        [str(second), "here:1", "mail,"],
    ]
    workers = json.loads(run("workers", "--json")[1])["workers"]
    assert [(one["id"], one["is_quiet"], one["queues"]) for one in workers] == [
        (str(first), True, []),
        (str(second), False, ["mail", "web"]),
    ]
    code, _, errors = run("quiet", str(uuid4()))
    assert (code, "no live worker has this id" in errors) == (1, True)
    assert "(quiet)" in run("status")[1]
    code, _, errors = run("quiet", "here:1")
    assert (code, "give the ids that `pgqueue workers` shows" in errors) == (2, True)


def test_a_connection_limit_below_the_need_is_named(engine: Engine) -> None:
    role = f"limited_{uuid4().hex[:8]}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 0 PASSWORD 'secret'"))
    url = engine.url.set(username=role, password="secret").render_as_string(hide_password=False)
    try:
        ended = CliRunner().invoke(main, ["--url", url, "status"])
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DROP ROLE {role}"))

    assert ended.exit_code == 1
    assert "raise the CONNECTION LIMIT of the role or the database" in ended.output
