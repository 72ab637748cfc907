"""``pgqueue limits`` and ``set-limit``, and the limits in ``pgqueue jobs ID``."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from shop_rig import assert_one_line, pgqueue
from sqlalchemy import Engine

from pgqueue import Limit, PgQueue, Worker

APPLICATION = """
import os
from pgqueue import Limit, PgQueue

queue = PgQueue(os.environ.get("SHOP_DATABASE"))

@queue.task(name="pay", limit=Limit(2, by="account", name="bank"))
def pay(account: int) -> None: ...

@queue.task(name="book", limit=Limit(1, order="strict"))
def book() -> None: ...
"""
APP = ("--app", "bank:queue")


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "bank.py").write_text(APPLICATION)
    return tmp_path


def printed(app: Path, url: str, *arguments: str) -> str:
    ended = pgqueue(app, *APP, *arguments, database_url=url)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def document(app: Path, url: str, *arguments: str) -> Any:
    return json.loads(printed(app, url, *arguments, "--json"))


def of_bank(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)
    queue.task(name="pay", limit=Limit(2, by="account", name="bank"))(lambda account: None)
    return queue


def test_limits_are_listed_with_their_jobs(engine: Engine, database_url: str, app: Path) -> None:
    assert printed(app, database_url, "limits") == "No worker has declared a limit.\n"
    queue = of_bank(engine)
    Worker(queue).run_until_empty()
    for _ in range(3):
        queue.tasks["pay"].delay(7)

    assert document(app, database_url, "limits") == {
        "limits": [
            {
                "name": "bank",
                "declared": 2,
                "capacity": 2,
                "is_set": False,
                "held": 0,
                "waiting": 3,
                "period": None,
                "burst": None,
                "is_fair": False,
            }
        ]
    }
    assert printed(app, database_url, "limits").split()[-4:] == ["bank", "2", "0", "3"]


def test_a_limit_is_set_and_reset(engine: Engine, database_url: str, app: Path) -> None:
    assert printed(app, database_url, "set-limit", "bank", "5") == "bank: 5 at once\n"
    assert "5 (in the code 2)" in printed(app, database_url, "limits")
    with engine.connect() as connection:
        [limit] = PgQueue(engine).limits(connection)
    assert (limit.capacity, limit.is_set) == (5, True)

    assert printed(app, database_url, "set-limit", "bank", "--reset") == "bank: 2 at once\n"
    assert document(app, database_url, "set-limit", "bank", "0")["capacity"] == 0


def test_one_key_is_paused_and_resumed(engine: Engine, database_url: str, app: Path) -> None:
    seven = ("--limit", "bank", "--key", "7")
    assert printed(app, database_url, "pause", *seven) == "bank [7]: paused\n"
    assert "paused (in the code 2)" in printed(app, database_url, "limits")
    queue = of_bank(engine)
    for account in (7, 8):
        queue.tasks["pay"].delay(account)
    assert Worker(queue).run_until_empty() == {"succeeded": 1}

    keys = {"queues": [], "tasks": [], "keys": ["bank [7]"], "is_paused": False}
    assert document(app, database_url, "resume", *seven) == keys
    assert "bank [7]" not in printed(app, database_url, "limits")
    assert Worker(queue).run_until_empty() == {"succeeded": 1}


def test_a_key_that_has_no_jobs_or_was_not_paused_is_told(
    engine: Engine, database_url: str, app: Path
) -> None:
    of_bank(engine).tasks["pay"].delay(7)

    def told(verb: str, key: str) -> str:
        ended = pgqueue(app, *APP, verb, "--limit", "bank", "--key", key, database_url=database_url)
        assert ended.returncode == 0, ended.stderr
        return ended.stderr

    assert told("pause", "7") == ""
    assert told("resume", "7") == ""
    assert told("pause", '"7"').startswith('No job of bank ["7"] waits or runs. A key is JSON: ')
    assert told("resume", "8").startswith("bank [8] was not paused")


def test_a_key_is_given_the_capacity_of_its_own_and_again_that_of_the_limit(
    engine: Engine, database_url: str, app: Path
) -> None:
    of_bank(engine)
    seven = ("set-limit", "bank", "--key", "7")
    assert printed(app, database_url, *seven, "1") == "bank [7]: 1 at once\n"
    assert printed(app, database_url, *seven, "--reset") == "bank [7]: 2 at once\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--limit", "bank"), "give --limit and --key together"),
        (("--key", "7"), "give --limit and --key together"),
        (("--limit", "book", "--key", "7"), "the limit is by no argument; omit the key"),
        (("--limit", "bnk", "--key", "7"), "there is no such limit"),
    ],
)
def test_a_wrong_key_is_not_paused(
    database_url: str, app: Path, arguments: tuple[str, ...], words: str
) -> None:
    ended = pgqueue(app, *APP, "pause", *arguments, database_url=database_url)

    assert ended.returncode in (1, 2)
    assert words in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bnk", "3"), "limit bnk: there is no such limit; known are bank, book"),
        (("book", "3"), "limit book: its order is strict, and the capacity 3; give 1"),
        (("bank",), "give either a CAPACITY or --reset"),
        (("bank", "3", "--reset"), "give either a CAPACITY or --reset"),
        (("bank", "-1"), "No such option|not in the range"),
    ],
)
def test_a_wrong_limit_is_refused(
    database_url: str, app: Path, arguments: tuple[str, ...], words: str
) -> None:
    ended = pgqueue(app, *APP, "set-limit", *arguments, database_url=database_url)

    assert ended.returncode != 0
    assert any(word in ended.stderr for word in words.split("|")), ended.stderr


def test_an_unknown_limit_is_named_in_one_line(database_url: str, app: Path) -> None:
    assert_one_line(pgqueue(app, *APP, "set-limit", "bnk", "3", database_url=database_url))


def test_a_job_shows_its_limits(engine: Engine, database_url: str, app: Path) -> None:
    queue = of_bank(engine)
    Worker(queue).run_until_empty()
    job = queue.tasks["pay"].delay(7)

    shown = document(app, database_url, "jobs", str(job.id))

    assert shown["status"] == "blocked"
    assert shown["limits"] == [
        {
            "key": "bank [7]",
            "held": 0,
            "capacity": 2,
            "period": None,
            "seconds_to_token": None,
            "is_fair": False,
        }
    ]
    assert "bank [7], 0 of 2 places held" in printed(app, database_url, "jobs", str(job.id))


def test_a_rate_is_listed_set_and_shown_with_a_job_that_waits_for_it(
    engine: Engine, database_url: str, app: Path
) -> None:
    queue = PgQueue(engine)
    rate = Limit(60, per=timedelta(hours=1), by="account", name="api")
    queue.task(name="call", limit=rate)(lambda account: None)
    _, second = (queue.tasks["call"].delay(7) for _ in range(2))
    assert Worker(queue).run_until_empty() == {"succeeded": 1}

    [listed] = document(app, database_url, "limits")["limits"]
    assert (listed["capacity"], listed["period"], listed["burst"]) == (60, 3600, 1)
    assert (listed["held"], listed["waiting"]) == (0, 1)
    assert "60 starts in 1:00:00" in printed(app, database_url, "limits")
    shown = document(app, database_url, "jobs", str(second.id))
    assert shown["status"] == "blocked"
    [use] = shown["limits"]
    assert 0 < use["seconds_to_token"] <= 60
    assert "api [7], 60 starts in 1:00:00, next start in" in printed(
        app, database_url, "jobs", str(second.id)
    )
    assert printed(app, database_url, "set-limit", "api", "0") == "api: paused\n"
    assert "api [7], paused" in printed(app, database_url, "jobs", str(second.id))
    changed = printed(app, database_url, "set-limit", "api", "90")
    assert changed == "api: 90 starts in 1:00:00\n"


def test_the_doctor_finds_jobs_that_wait_for_a_limit_that_no_worker_has_declared(
    engine: Engine, database_url: str, app: Path
) -> None:
    queue = of_bank(engine)
    queue.tasks["pay"].delay(7)

    found = pgqueue(app, *APP, "doctor", database_url=database_url).stdout
    assert "1 job waits for bank, which no worker has declared" in found
    Worker(queue).run_until_empty()
    found = pgqueue(app, *APP, "doctor", database_url=database_url).stdout
    assert "no job waits for a limit that no worker has declared" in found
