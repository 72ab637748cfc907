"""``pgqueue pause``, ``resume`` and ``set-limit``: each kind of thing that workers can skip."""

import json
from datetime import timedelta

import pytest
from shop_rig import assert_one_line, command
from sqlalchemy import Engine

from pgqueue import Limit, PgQueue, Worker


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)
    queue.task(name="post", queue="mail")(lambda: None)
    queue.task(name="pay", limit=Limit(2, by="account", name="bank"))(lambda account: None)
    queue.task(name="book", limit=Limit(1, order="strict"))(lambda: None)
    rate = Limit(60, per=timedelta(hours=1), by="account", name="api")
    queue.task(name="call", limit=rate)(lambda account: None)
    return queue


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ("mail male", ["mail", "male"], "No task of the app uses queue male. Is the name"),
        ("--task post --task pst", ["post", "pst"], "The app has no task pst. Is the name"),
        ("--limit bank --key 7", ["bank [7]"], "No job of bank [7] waits or runs. A key is"),
    ],
)
def test_each_kind_is_paused_and_resumed_and_a_doubtful_name_is_told(
    queue: PgQueue, words: str, said: list[str], hint: str
) -> None:
    ended = command(queue, "pause", *words.split())
    document = json.loads(command(queue, "resume", *words.split(), "--json").stdout)

    assert (ended.returncode, ended.stdout) == (0, "".join(f"{name}: paused\n" for name in said))
    assert ended.stderr.startswith(hint)
    assert set(document) == {"queues", "tasks", "keys", "is_paused"}
    assert document["is_paused"] is False
    assert [*document["queues"], *document["tasks"], *document["keys"]] == said


def test_what_is_paused_is_shown_and_not_run(queue: PgQueue) -> None:
    for task in ("post", "book"):
        queue.tasks[task].delay()
    for account in (7, 8):
        queue.tasks["pay"].delay(account)
    for words in ("mail", "--task book", "--limit bank --key 7"):
        assert command(queue, "pause", *words.split()).stderr == ""

    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}
    status = command(queue, "status").stdout
    assert "mail (paused)" in status
    assert "Paused tasks: book." in status
    limits = command(queue, "limits").stdout
    assert "paused (in the code 2 at once)" in limits

    assert command(queue, "resume", "mail", "--task", "book").returncode == 0
    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 2}
    seven = ("resume", "--limit", "bank", "--key", "7")
    assert command(queue, *seven).stderr == ""
    assert command(queue, *seven).stderr.startswith("bank [7] was not paused")
    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}


def test_all_queues_are_paused_and_resumed_by_one_command(queue: PgQueue) -> None:
    for task in ("post", "book"):
        queue.tasks[task].delay()
    queue.tasks["pay"].delay(7)
    assert command(queue, "pause", "mail").returncode == 0
    paused = command(queue, "pause", "*")

    assert (paused.stdout, paused.stderr) == ("*: paused\n", "")
    assert Worker(queue).run_until_empty(timeout=60) == {}
    assert Worker(queue, ["*"]).run_until_empty(timeout=60) == {}
    with queue.session() as session, queue.claim(session) as claimed:
        assert claimed is None
    assert "All queues are paused." in command(queue, "status").stdout
    assert json.loads(command(queue, "status", "--json").stdout)["are_all_queues_paused"] is True
    words = "All queues are paused: run `pgqueue resume '*'` too."
    assert command(queue, "resume", "male").stderr.splitlines()[-1] == words

    assert command(queue, "resume", "*").stderr == ""
    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 2}
    assert command(queue, "resume", "mail").stderr == ""
    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}
    assert json.loads(command(queue, "status", "--json").stdout)["are_all_queues_paused"] is False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bank 5", "bank: 5 at once\n"),
        ("bank --reset", "bank: 2 at once\n"),
        ("bank 0", "bank: paused\n"),
        ("bank --key 7 1", "bank [7]: 1 at once\n"),
        ("bank --key 7 --reset", "bank [7]: 2 at once\n"),
        ("api 90", "api: 90 starts in 1 h\n"),
    ],
)
def test_a_limit_is_set(queue: PgQueue, words: str, said: str) -> None:
    ended = command(queue, "set-limit", *words.split())
    document = json.loads(command(queue, "set-limit", *words.split(), "--json").stdout)

    assert (ended.stdout, ended.stderr) == (said, "")
    assert document["name"] in ("bank", "bank [7]", "api")


def test_what_cannot_be_is_refused(queue: PgQueue) -> None:
    for words, error in (
        ("pause ma*", "queue is 'ma*'; "),
        ("pause", "name a queue, a task with --task, or a key with --limit, --key"),
        ("pause --limit bank", "give --limit and --key together"),
        ("pause --key 7", "give --limit and --key together"),
        ("pause --limit book --key 7", "the limit has no `by`; omit the key"),
        ("pause --limit bnk --key 7", "there is no such limit"),
        ("set-limit bnk 3", "limit bnk: there is no such limit; known are api, bank, book"),
        ("set-limit book 3", "limit book: its order is strict, and the capacity 3; give 1"),
        ("set-limit bank", "give either a CAPACITY or --reset"),
        ("set-limit bank 3 --reset", "give either a CAPACITY or --reset"),
    ):
        assert_one_line(command(queue, *words.split()), error)


@pytest.mark.parametrize("words", [["mail", "not a queue"], ["mail", "--task", "not\ta task"]])
def test_one_bad_name_pauses_nothing(queue: PgQueue, words: list[str]) -> None:
    assert command(queue, "pause", *words).returncode != 0
    with queue.session() as session:
        assert not any(each.paused_at for each in queue.views.queues(session).queues)
