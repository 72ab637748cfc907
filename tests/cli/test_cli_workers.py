"""``pgqueue workers`` and ``pgqueue quiet``."""

import json
from pathlib import Path
from uuid import uuid4

from shop_rig import pgqueue
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from pgqueue import WorkerProcess


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
