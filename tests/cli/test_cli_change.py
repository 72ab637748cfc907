"""``pgqueue change``, and ``pgqueue requeue --args``."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from shop_rig import assert_one_line, pgqueue
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from pgqueue import Job, PgQueue, Secret, Unique, Worker

APP = """
    import os

    from pgqueue import Limit, PgQueue, Secret, Unique

    queue = PgQueue(os.environ.get("SHOP_DATABASE"))

    @queue.task(name="send")
    def send(to: str, token: Secret[str] = "", copies: int = 1) -> None: ...

    @queue.task(name="limited", limit=Limit(1))
    def limited(n: int) -> None: ...

    @queue.task(name="index", unique=Unique(by=("page",)))
    def index(page: int) -> None: ...
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(textwrap.dedent(APP))
    return tmp_path


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)

    @queue.task(name="send", max_attempts=1)
    def send(to: str, token: Secret[str] = "", copies: int = 1) -> None:
        if not to:
            raise ValueError("nobody")

    return queue


def jobs(engine: Engine) -> list[tuple[int, dict[str, Any]]]:
    with Session(engine) as session:
        return [(job.priority, job.args) for job in session.scalars(select(Job).order_by(Job.id))]


class Shell:
    def __init__(self, shop: Path, database_url: str) -> None:
        self._shop, self._url = shop, database_url

    def __call__(self, *words: str, app: bool = True) -> tuple[int, str, str]:
        where = ("--app", "shop:queue") if app else ("--url", self._url)
        ended = pgqueue(self._shop, *words, *where, database_url=self._url)
        return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def shell(shop: Path, database_url: str) -> Shell:
    return Shell(shop, database_url)


class TestDryRun:
    def test_it_shows_what_would_change_and_changes_nothing(
        self, engine: Engine, queue: PgQueue, shell: Shell
    ) -> None:
        for to in ("ada", "bob"):
            queue.tasks["send"].delay(to, "s3cret")
        before = jobs(engine)

        code, said, _ = shell(
            *("change", "--task", "send", "--priority", "1", "--dry-run"),
            *("--args", '{"to": "bob", "token": "other"}'),
        )

        masked = 'args.token "***" -> "***"'
        assert (code, said.splitlines()) == (
            0,
            [
                f'1: priority 5 -> 1, args.to "ada" -> "bob", {masked}',
                f"2: priority 5 -> 1, {masked}",
            ],
        )
        assert jobs(engine) == before

    def test_json_has_each_job_before_and_after_and_what_is_refused(
        self, engine: Engine, queue: PgQueue, shell: Shell
    ) -> None:
        queue.tasks["send"].delay("ada")
        queue.tasks["send"].delay("")
        Worker(queue).run_until_empty(timeout=60)
        for to in ("ada", "bob"):
            queue.tasks["send"].delay(to)

        code, said, _ = shell(
            "change", "2", "3", "4", "9", "--json", "--dry-run", "--args", '{"to": "bob"}'
        )

        document = json.loads(said)
        assert code == 1
        assert document["counts"] == {"unchanged": 2, "changed": 1, "not_found": 1}
        failed, changed, same, missing = document["jobs"]
        assert failed["reason"] == "its status is failed"
        assert (changed["before"], changed["after"]) == (
            {"args": {"to": "ada"}},
            {"args": {"to": "bob"}},
        )
        assert (same["reason"], same["after"]) == ("it has these values already", {})
        assert missing["reason"].startswith("no job has this id")

    def test_wrong_arguments_are_refused_as_the_change_refuses_them(
        self, engine: Engine, queue: PgQueue, shell: Shell
    ) -> None:
        queue.tasks["send"].delay("ada")
        wrong = ("change", "--task", "send", "--args", '{"copies": "two"}')

        for more in ("--dry-run", "--yes"):
            code, said, errors = shell(*wrong, more)
            assert code == 1
            assert "1: refused, because task send: argument copies" in errors
            assert said == ("1 refused\n" if more == "--yes" else "")
        assert jobs(engine) == [(5, {"to": "ada"})]


class TestChange:
    def test_by_id_and_by_filter(self, engine: Engine, queue: PgQueue, shell: Shell) -> None:
        for to in ("ada", "bob", "eve"):
            queue.tasks["send"].delay(to)

        assert shell("change", "2", "--priority", "0")[:2] == (0, "2: changed\n")
        assert shell("change", "2", "--priority", "0")[1].startswith("2: unchanged, because it has")
        code, _, errors = shell("change", "--task", "send", "--args", '{"copies": 2}')
        assert code == 2
        assert "This would change 3 waiting jobs; to confirm, add --yes" in errors
        code, said, _ = shell(
            "change", "--before", "3", "--args", '{"copies": 2}', "--yes", "--json"
        )
        assert json.loads(said) == {"matched": 2, "counts": {"changed": 2}}
        assert jobs(engine) == [
            (5, {"to": "ada", "copies": 2}),
            (0, {"to": "bob", "copies": 2}),
            (5, {"to": "eve"}),
        ]

    def test_jobs_that_wait_for_a_limit_are_found(self, engine: Engine, shell: Shell) -> None:
        for n in "12":
            shell("enqueue", "limited", "--args", f'{{"n": {n}}}')

        assert shell("change", "--task", "limited", "--delay", "60", "--yes")[1] == "2 changed\n"

    def test_a_time_and_a_database_without_the_app(
        self, engine: Engine, queue: PgQueue, shell: Shell
    ) -> None:
        queue.tasks["send"].delay("ada")

        time = "2099-01-31T08:00+01:00"
        assert shell("change", "1", "--run-at", time, app=False)[1] == "1: changed\n"
        code, _, errors = shell("change", "1", "--args", '{"to": "bob"}', app=False)
        assert (code, "no task 'send' is registered" in errors) == (1, True)
        with Session(engine) as session:
            [job] = session.scalars(select(Job))
            assert job.run_at.year == 2099

    @pytest.mark.parametrize(
        ("words", "error"),
        [
            (("1",), "nothing to change is given"),
            (("--priority", "1"), "Which jobs? Give their ids, or say --task"),
            (("1", "--task", "send", "--priority", "1"), "not both"),
            (("1", "--run-at", "2099-01-31"), "has no time zone"),
            (("1", "--run-at", "soon"), "is not a time"),
            (("1", "--delay", "-1"), "is not between 0 and 86400 seconds"),
            (("1", "--args", "[1]"), "--args is not a JSON object"),
            (("1", "--args", "[" * 3000), "--args is nested too deeply"),
        ],
    )
    def test_a_wrong_command_line_is_refused(
        self, shop: Path, database_url: str, words: tuple[str, ...], error: str
    ) -> None:
        ended = pgqueue(shop, "change", "--app", "shop:queue", *words, database_url=database_url)

        assert_one_line(ended, error)


def test_of_many_jobs_those_whose_new_key_is_taken_are_named(engine: Engine, shell: Shell) -> None:
    queue = PgQueue(engine)

    @queue.task(name="index", unique=Unique(by=("page",)))
    def index(page: int) -> None: ...

    for page in (1, 2):
        index.delay(page)

    code, said, errors = shell("change", "--task", "index", "--args", '{"page": 3}', "--yes")

    assert (code, said) == (1, "1 changed, 1 key taken\n")
    assert errors == "2: key taken, because job 1 of its queue has its unique key\n"


@pytest.mark.parametrize(
    "words",
    [
        ("change", "--task", "sned", "--priority", "1", "--yes"),
        ("change", "--task", "sned", "--priority", "1", "--dry-run"),
        ("requeue", "--status", "failed", "--task", "sned", "--yes"),
        ("jobs", "--task", "sned"),
    ],
)
def test_where_no_job_fits_an_unknown_task_is_told(
    engine: Engine, shell: Shell, words: tuple[str, ...]
) -> None:
    assert shell(*words) == (
        0,
        "No job fits.\n",
        "The app has no task sned. Is the name misspelt?\n",
    )


def test_requeue_takes_other_arguments(engine: Engine, queue: PgQueue, shell: Shell) -> None:
    for _ in range(2):
        queue.tasks["send"].delay("")
    Worker(queue).run_until_empty(timeout=60)

    code, _, errors = shell("requeue", "1", "--args", '{"too": "ada"}')
    assert (code, "1: refused, because task send: it has no argument 'too'" in errors) == (1, True)
    code, said, _ = shell(
        *("requeue", "--status", "failed", "--yes"), *("--args", '{"to": "ada", "copies": 2}')
    )
    assert (code, said) == (0, "2 requeued\n")
    assert jobs(engine) == [(5, {"to": "ada", "copies": 2})] * 2
