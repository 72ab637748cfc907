"""``pgqueue schedules``: the list, and what it changes."""

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from shop_rig import pgqueue, write_shop
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from pgqueue import Job, PgQueue

APP = ("--app", "shop:queue")


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path)


@pytest.fixture
def schedules(engine: Engine) -> None:
    queue = PgQueue(engine)

    @queue.task(name="shop.add")
    def add(a: int, b: int) -> int:
        return a + b

    with queue.session() as session, session.begin():
        queue.schedules.add(
            session, add, "30 2 * * *", name="night", timezone="Europe/Berlin", args=(1, 2)
        )
        queue.schedules.add(session, add, every=timedelta(hours=1), name="hourly", args=(3, 4))


class Shell:
    def __init__(self, shop: Path, url: str) -> None:
        self._shop, self._url = shop, url

    def run(self, *words: str, code: int = 0) -> Any:
        ended = pgqueue(self._shop, *APP, *words, database_url=self._url)
        assert ended.returncode == code, ended.stderr
        return ended

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json").stdout)


@pytest.fixture
def shell(shop: Path, database_url: str) -> Shell:
    return Shell(shop, database_url)


def test_the_list_has_three_runs_in_the_zone_and_in_utc(schedules: None, shell: Shell) -> None:
    found = {one["name"]: one for one in shell.json("schedules")["schedules"]}
    lines = shell.run("schedules").stdout.splitlines()

    runs = found["night"]["next_runs"]
    assert len(runs) == 3
    for run in runs:
        assert datetime.fromisoformat(run["local"]) == datetime.fromisoformat(run["utc"])
        assert run["utc"].endswith("+00:00")
    assert found["hourly"]["every"] == 3600
    assert [line.split()[0] for line in lines[1:] if not line.startswith(" ")] == [
        "hourly",
        "night",
    ]
    assert sum("30 2 * * * Europe/Berlin" in line for line in lines) == 1
    assert len(lines) == 1 + 2 * 3


def test_no_schedules_are_told(engine: Engine, shell: Shell) -> None:
    assert shell.run("schedules").stdout == "No schedules.\n"
    assert shell.json("schedules") == {"schedules": []}


def test_pause_resume_trigger_and_remove(schedules: None, shell: Shell, engine: Engine) -> None:
    assert shell.run("schedules", "pause", "night", "hourly").stdout == (
        "night: paused\nhourly: paused\n"
    )
    assert [one["is_paused"] for one in shell.json("schedules")["schedules"]] == [True, True]
    assert "paused" in shell.run("schedules").stdout
    assert shell.json("schedules", "resume", "night") == {
        "schedules": [{"name": "night", "change": "resumed"}]
    }
    triggered = shell.json("schedules", "trigger", "hourly")["schedules"][0]
    assert shell.run("schedules", "remove", "hourly").stdout == "hourly: removed\n"
    with Session(engine) as session:
        assert session.get_one(Job, triggered["job_id"]).args == {"a": 3, "b": 4}
    assert [one["name"] for one in shell.json("schedules")["schedules"]] == ["night"]


def test_the_removal_of_a_schedule_of_the_code_is_told_as_one_that_does_not_last(
    schedules: None, shell: Shell, engine: Engine
) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE pgqueue.schedules SET declared_in = 'shop'"))

    reason = "module shop declares it, so the next worker that starts adds it again; pause it"
    assert shell.run("schedules", "remove", "night").stdout == f"night: removed; {reason}\n"
    assert shell.json("schedules", "remove", "hourly")["schedules"] == [
        {"name": "hourly", "change": "removed", "reason": reason}
    ]


@pytest.mark.parametrize("verb", ["pause", "resume", "trigger", "remove"])
def test_an_unknown_schedule_is_told_and_the_others_are_changed(
    schedules: None, shell: Shell, verb: str
) -> None:
    ended = shell.run("schedules", verb, "lost", "night", code=1)

    assert "schedule lost does not exist" in ended.stderr
    assert ended.stdout.startswith("night: ")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("task = 'lost.task'", "this app knows no task lost.task"),
        ("timezone = 'Mars/Olympus'", "'Mars/Olympus', which this system does not have"),
        ("overlap = 'wait', last_job_id = 7", "it waits for job 7"),
        ("overlap = 'skip'", "no worker runs that knows task shop.add"),
    ],
)
def test_an_overdue_tick_is_told_with_its_reason(
    schedules: None, shell: Shell, engine: Engine, damage: str, words: str
) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                f"UPDATE pgqueue.schedules SET {damage}, next_at = now() - interval '2 minutes'"
                " WHERE name = 'night'"
            )
        )

    listed = shell.run("schedules").stdout
    # The server of the tests keeps no commits, which is wrong too.
    found = json.loads(shell.run("doctor", "--json", code=1).stdout)["findings"]

    assert "Warning: schedule night: its tick of" in listed
    assert words in listed
    assert [one["detail"] for one in found if one["subject"] == "schedules"] != []
    assert words in next(one["detail"] for one in found if one["subject"] == "schedules")
