"""The commands that list something: the columns of each table, the keys of each document."""

import json
import os
import socket
import uuid
from datetime import datetime, timedelta
from typing import Any

import pytest
from shop_rig import assert_one_line, command
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from pgqueue import Lease, Limit, MessageQueue, PgQueue, Worker
from pgqueue.tables import WorkerProcess

AN_HOUR_AGO = "created_at = created_at - interval '1 hour'"


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)

    @queue.task(name="mail.fail", queue="mail", max_attempts=1)
    def fail(words: str) -> None:
        raise ValueError(words)

    queue.task(name="add")(lambda a: None)
    queue.task(name="pay", limit=Limit(2, by="account", name="bank"))(lambda account: None)
    return queue


def document(queue: PgQueue, *words: str) -> dict[str, Any]:
    ended = command(queue, *words, "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def lines(queue: PgQueue, *words: str) -> list[str]:
    ended = command(queue, *words)
    assert ended.returncode == 0, ended.stderr
    return str(ended.stdout).splitlines()


def workers(session: Session, number: int, **values: Any) -> list[uuid.UUID]:
    """Rows of live workers, in this order."""
    ids = [uuid.uuid4() for _ in range(number)]
    process = {"hostname": "here", "pid": 1, "backend_pid": 1, "queues": ["mail"], "slots": 2}
    for id in ids:
        session.add(WorkerProcess(id=id, **process | values))
        session.flush()
    session.commit()
    return ids


def test_an_empty_list_says_so(engine: Engine) -> None:
    queue = PgQueue(engine)

    for name, said in (
        ("jobs", "No job fits."),
        ("workers", "No worker lives."),
        ("schedules", "No schedules."),
        ("limits", "No worker has declared a limit."),
        ("batches", "There are no batches."),
        ("failures", "No errors."),
        ("stats", "No attempt has ended in this time."),
    ):
        assert lines(queue, name) == [said]
        assert document(queue, name)[name] == []


class TestJobs:
    def test_the_newest_jobs_are_first_and_paged(self, queue: PgQueue) -> None:
        ids = [queue.tasks["add"].delay(n).id for n in range(5)]

        first = document(queue, "jobs", "--limit", "2")
        rest = document(queue, "jobs", "--before", str(first["next_before"]))
        plain = command(queue, "jobs", "--limit", "2")

        assert [job["id"] for job in first["jobs"]] == ids[:2:-1]
        assert ([job["id"] for job in rest["jobs"]], rest["next_before"]) == (ids[2::-1], None)
        assert plain.stderr == f"There are older ones: add --before {ids[3]}\n"

    def test_waiting_jobs_are_in_the_order_in_which_they_start(self, queue: PgQueue) -> None:
        add = queue.tasks["add"]
        ids = [add.options(priority=priority).delay(1).id for priority in (5, 5, 9, 0)]
        words = ("jobs", "--status", "pending")

        first = document(queue, *words, "--limit", "2")
        rest = document(queue, *words, "--before", first["next_before"])
        plain = command(queue, *words, "--limit", "2")
        other = command(queue, "jobs", "--status", "failed", "--before", first["next_before"])

        assert [job["id"] for job in first["jobs"]] == [ids[3], ids[0]]
        assert ([job["id"] for job in rest["jobs"]], rest["next_before"]) == (ids[1:3], None)
        assert plain.stderr == f"There are more: add --before {first['next_before']}\n"
        assert other.returncode == 2
        assert "the page before was of a list with another status" in other.stderr

    def test_a_filter_as_a_line_selects(self, queue: PgQueue) -> None:
        add = queue.tasks["add"]
        ids = [add.options(tags=[tag]).delay(n).id for n, tag in ((1, "vip"), (2, "vip"), (1, "x"))]

        found = document(queue, "jobs", "--where", "tag:vip arg.a:1 created:>1h")
        twice = command(queue, "jobs", "--task", "add", "--where", "task:add")
        unknown = command(queue, "jobs", "--where", "colour:red")

        assert [job["id"] for job in found["jobs"]] == [ids[0]]
        assert "task is given twice" in twice.stderr
        assert "its words are task, queue" in unknown.stderr

    @pytest.mark.parametrize("start", ["0", "1/2/x", "10/1/1/1"])
    def test_no_page_begins_at_what_none_has_printed(self, queue: PgQueue, start: str) -> None:
        ended = command(queue, "jobs", "--status", "pending", "--before", start)

        assert ended.returncode == 2
        assert f"{start!r} is not the id of a job" in ended.stderr

    def test_jobs_are_filtered(self, queue: PgQueue) -> None:
        queue.tasks["mail.fail"].delay("no")
        Worker(queue, ["mail"]).run_until_empty(timeout=60)
        queue.tasks["add"].delay(1)
        with queue.session() as session, session.begin(), queue.batch(session, "b"):
            queue.tasks["add"].options(tags=["a"], unique_key="k").enqueue(session, 2)
            session.execute(text(f"UPDATE pgqueue.jobs SET {AN_HOUR_AGO} WHERE id = 2"))
        queue.tasks["pay"].delay(7)

        def ids(*words: str) -> list[int]:
            return [job["id"] for job in document(queue, "jobs", *words)["jobs"]]

        assert ids("--status", "failed", "--status", "pending") == [3, 2, 1]
        assert ids("--tag", "a", "--status", "failed") == []
        assert ids("--queue", "mail") == [1]
        assert ids("--task", "add") == [3, 2]
        assert ids("--after", "2") == [4, 3]
        assert ids("--limit-key", "bank [7]") == [4]
        assert ids("--unique-key", "k") == ids("--batch", "1") == [3]
        assert ids("--older-than", "3600", "--status", "pending") == [2]

    @pytest.mark.parametrize("limit", ["0", "10001", "seven"])
    def test_a_limit_that_is_no_number_of_jobs_is_refused(self, queue: PgQueue, limit: str) -> None:
        ended = command(queue, "jobs", "--limit", limit)

        assert_one_line(ended, "Invalid value for '--limit'", limit)
        assert (ended.returncode, ended.stdout) == (2, "")

    def test_a_job_has_the_first_line_of_its_last_error(self, queue: PgQueue) -> None:
        queue.tasks["mail.fail"].delay("not at all\nsecond line")
        Worker(queue, ["mail"]).run_until_empty(timeout=60)

        heading, line = lines(queue, "jobs")

        assert heading.split() == [
            *("id", "status", "task", "queue", "attempts", "created", "last", "error")
        ]
        assert line.split()[:5] == ["1", "failed", "mail.fail", "mail", "1/1"]
        assert line.endswith("not at all")

    def test_no_escape_sequence_in_the_words_of_a_job_is_obeyed(self, queue: PgQueue) -> None:
        queue.tasks["mail.fail"].delay("\x1b[2J\x1b]0;mine\x07\u202e<b>")
        Worker(queue, ["mail"]).run_until_empty(timeout=60)

        for words in (["jobs"], ["jobs", "1", "--show-arguments"]):
            said = command(queue, *words).stdout
            assert "\\x1b[2J\\x1b]0;mine\\x07\\u202e<b>" in said
            assert not {"\x1b", "\x07", "\u202e"} & set(said)


class TestStatus:
    def test_jobs_are_counted_by_queue_and_status(self, queue: PgQueue, session: Session) -> None:
        for number in range(2):
            queue.tasks["add"].delay(number)
        queue.pause(session, "mail")
        session.commit()

        default, mail = document(queue, "status")["queues"]
        heading, first, second = lines(queue, "status")[:3]

        assert (default["name"], default["jobs"]["pending"], default["is_paused"]) == (
            *("default", 2, False),
        )
        assert default["oldest_due_age"] > 0
        assert (mail["name"], mail["is_paused"], mail["oldest_due_age"]) == ("mail", True, None)
        assert heading.split()[:4] == ["queue", "pending", "running", "blocked"]
        assert first.split()[:3] == ["default", "2", "0"]
        assert second.startswith("mail (paused)")

    def test_one_queue_is_shown_alone_with_the_workers_that_serve_it(
        self, queue: PgQueue, session: Session
    ) -> None:
        queue.tasks["add"].delay(1)
        for served in ("default", "mail"):
            workers(session, 1, hostname=served, queues=[served])

        found = document(queue, "status", "--queue", "default", "--queue", "empty")
        _, first, second = lines(queue, "status", "--queue", "default", "--queue", "empty")[:3]

        assert [one["name"] for one in found["queues"]] == ["default", "empty"]
        assert [one["jobs"]["pending"] for one in found["queues"]] == [1, 0]
        assert found["queues"][1].keys() == found["queues"][0].keys()
        assert [worker["hostname"] for worker in found["workers"]] == ["default"]
        assert (first.split()[:2], second.split()[:2]) == (["default", "1"], ["empty", "0"])
        assert command(queue, "status", "--queue", "a b").returncode != 0

    def test_what_goes_in_and_out_of_a_queue_says_when_it_is_empty(
        self, queue: PgQueue, session: Session
    ) -> None:
        queue.tasks["add"].delay(1)
        minute = (
            "INSERT INTO pgqueue.queue_minutes (at, queue, counted_at, waiting, due, blocked,"
            " running, started) SELECT date_trunc('minute', now()) - ago * interval '1 minute',"
            " 'default', now(), due, due, 0, 0, started"
            " FROM (VALUES (6, 300, 99), (2, 220, 100), (0, 200, 7)) AS m (ago, due, started)"
        )
        session.execute(text(minute))
        session.commit()

        [default] = document(queue, "status")["queues"]
        heading, first = lines(queue, "status")[:2]

        assert (default["in_per_minute"], default["out_per_minute"]) == (5, 25)
        assert default["empty_in"] == 600
        assert heading.split()[-4:] == ["in/min", "out/min", "empty", "in"]
        assert first.split()[-4:] == ["5", "25", "10", "min"]

    def test_a_blocked_job_ages_its_queue(self, queue: PgQueue) -> None:
        queue.task(name="sync", queue="crm", limit=Limit(1))(lambda: None).delay()

        [crm] = document(queue, "status")["queues"]

        assert (crm["jobs"]["blocked"], crm["jobs"]["pending"]) == (1, 0)
        assert crm["oldest_due_age"] > 0

    def test_beside_many_jobs_the_succeeded_are_counted_only_when_asked(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        for number in range(2):
            queue.tasks["add"].delay(number)
        with engine.begin() as connection:
            ended = "outcome = 'succeeded', finished_at = clock_timestamp()"
            connection.execute(text(f"UPDATE pgqueue.jobs SET {ended} WHERE id = 1"))
            connection.execute(text("DELETE FROM pgqueue.message_queue WHERE target_id = 1"))
            # As a server with as many jobs would have it in its statistics.
            many = "UPDATE pg_class SET reltuples = 1e6 WHERE oid = 'pgqueue.jobs'::regclass"
            connection.execute(text(many))

        [short] = document(queue, "status")["queues"]
        [exact] = document(queue, "status", "--exact")["queues"]
        plain = lines(queue, "status")

        assert (short["jobs"]["pending"], short["jobs"]["succeeded"]) == (1, None)
        assert (exact["jobs"]["pending"], exact["jobs"]["succeeded"]) == (1, 1)
        assert "?" in plain[1]
        assert "About 1,000,000 jobs in all; --exact counts those marked ?" in plain[2]

    @pytest.mark.parametrize(("slots", "ahead"), [(2, 1), (3, 0)])
    def test_the_jobs_claimed_ahead_of_the_slots_are_told(
        self, queue: PgQueue, session: Session, slots: int, ahead: int
    ) -> None:
        for number in range(3):
            queue.tasks["add"].delay(number)
        [busy] = workers(session, 1, slots=slots)
        for message in session.query(MessageQueue).all():
            leased = {"target_id": message.target_id, "message_id": message.id}
            session.add(Lease(**leased, attempt=1, worker_id=busy))
            session.delete(message)
        session.commit()

        found = document(queue, "status")
        plain = lines(queue, "status")

        assert [worker["claimed_ahead"] for worker in found["workers"]] == [ahead]
        assert found["queues"][0]["jobs"]["running"] == 3
        told = [line for line in plain if line.startswith("The running include 1 claimed ahead")]
        assert len(told) == ahead

    def test_jobs_that_nobody_runs_are_warned_of(self, queue: PgQueue, engine: Engine) -> None:
        for number in range(2):
            queue.tasks["add"].delay(number)
        row = "INSERT INTO pgqueue.unreadable_jobs (job_id, task, reason) VALUES (2, 'add', 'why')"
        with engine.begin() as connection:
            connection.execute(text(row))
        other = PgQueue(engine)
        other.task(name="other")(lambda: None)

        found = document(other, "status")
        plain = lines(other, "status")

        assert [(one["name"], one["due_jobs"]) for one in found["unknown_tasks"]] == [("add", 2)]
        [met] = found["unreadable_jobs"]
        assert (met["task"], met["jobs"], met["reason"]) == ("add", 1, "why")
        assert met["oldest_age"] >= 0
        warnings = [line for line in plain if line.startswith("Warning: ")]
        assert warnings[0].startswith(
            "Warning: this application has no task add, of which 2 jobs are"
        )
        assert warnings[1].startswith("Warning: 1 job waits (the oldest since")


def test_workers_have_their_ids(queue: PgQueue, session: Session) -> None:
    first, second = workers(session, 2, queues=["mail", "web"])
    queue.quiet(session, first)
    session.commit()

    heading, *told = lines(queue, "workers")
    listed = document(queue, "workers")["workers"]

    assert heading.split()[:6] == ["id", "worker", "queues", "jobs/slots", "last", "heartbeat"]
    assert [line.split()[:3] for line in told] == [
        [str(first), "here:1", "(quiet)"],
        [str(second), "here:1", "mail,"],
    ]
    assert [(one["id"], one["is_quiet"], one["queues"]) for one in listed] == [
        (str(first), True, []),
        (str(second), False, ["mail", "web"]),
    ]
    assert (listed[0]["slots"], listed[0]["jobs"]) == (2, 0)


def test_workers_have_the_versions_of_their_applications(queue: PgQueue, session: Session) -> None:
    workers(session, 1, version="v7")
    workers(session, 1)  # of an application without a version

    heading, first, _ = lines(queue, "workers")

    assert (heading.split()[-3], first.split()[-1]) == ("version", "v7")
    assert [one["version"] for one in document(queue, "workers")["workers"]] == ["v7", None]


def test_workers_have_the_jobs_that_they_hold(queue: PgQueue, session: Session) -> None:
    [worker] = workers(session, 1)
    job_id = queue.tasks["add"].delay(1).id
    lease = {"target_id": job_id, "message_id": 1, "attempt": 2, "worker_id": worker}
    session.add(Lease(**lease))
    session.commit()

    heading, line = lines(queue, "workers")
    [listed] = document(queue, "workers")["workers"]

    assert heading.endswith("oldest job")
    assert f"  {job_id} add since " in line
    [held] = listed["holds"]
    assert datetime.fromisoformat(held.pop("since")).utcoffset() == timedelta(0)
    assert held == {"job_id": job_id, "task": "add", "queue": "default", "attempt": 2}


def test_health_is_that_of_the_workers_of_this_host(queue: PgQueue, session: Session) -> None:
    workers(session, 1)  # of another host
    dead = command(queue, "health")
    workers(session, 1, hostname=socket.gethostname(), pid=os.getpid())
    live = command(queue, "health")

    assert (dead.returncode, "No worker lives on" in dead.stderr) == (1, True)
    assert live.returncode == 0
    assert live.stdout.endswith(f": {os.getpid()}\n")


class TestSchedules:
    @pytest.fixture(autouse=True)
    def schedules(self, queue: PgQueue) -> None:
        add = queue.tasks["add"]
        with queue.session() as session, session.begin():
            queue.schedules.add(
                session, add, "30 2 * * *", name="night", timezone="Europe/Berlin", args=(1,)
            )
            queue.schedules.add(session, add, every=timedelta(hours=1), name="hourly", args=(3,))
            queue.schedules.pause(session, "hourly")

    def test_each_schedule_has_three_runs_in_its_zone_and_in_utc(self, queue: PgQueue) -> None:
        hourly, night = document(queue, "schedules")["schedules"]
        _, *told = lines(queue, "schedules")

        assert len(night["next_runs"]) == 3
        for run in night["next_runs"]:
            assert datetime.fromisoformat(run["local"]) == datetime.fromisoformat(run["utc"])
            assert run["utc"].endswith("+00:00")
        assert (hourly["every"], hourly["is_paused"], night["is_paused"]) == (3600, True, False)
        assert [line.split()[0] for line in told if line[0] != " "] == ["hourly", "night"]
        assert "30 2 * * * Europe/Berlin" in next(line for line in told if line[0] == "n")
        assert [line.endswith("paused") for line in told] == [True] + [False] * (len(told) - 1)

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            ("task = 'lost.task'", "this application has no task lost.task"),
            ("timezone = 'Mars/Olympus'", "'Mars/Olympus', which this system does not have"),
            ("overlap = 'wait', last_job_id = 7", "it waits for job 7"),
            ("overlap = 'skip'", "no worker runs that knows task add"),
        ],
    )
    def test_an_overdue_tick_is_told_with_its_reason(
        self, queue: PgQueue, engine: Engine, damage: str, words: str
    ) -> None:
        late = f"{damage}, next_at = now() - interval '2 minutes'"
        with engine.begin() as connection:
            connection.execute(text(f"UPDATE pgqueue.schedules SET {late} WHERE name = 'night'"))

        [warning] = [line for line in lines(queue, "schedules") if line.startswith("Warning")]
        night = document(queue, "schedules")["schedules"][1]
        found = json.loads(command(queue, "doctor", "--json").stdout)["findings"]

        assert warning.startswith("Warning: schedule night: its tick of")
        assert words in warning
        assert words in night["overdue"]
        assert [one["detail"] for one in found if one["subject"] == "schedules"] == [
            night["overdue"]
        ]


def test_limits_have_their_capacity_and_their_jobs(queue: PgQueue, session: Session) -> None:
    rate = Limit(60, per=timedelta(hours=1), by="account", name="api")
    queue.task(name="call", limit=rate)(lambda account: None)
    Worker(queue).run_until_empty(timeout=60)
    for _ in range(3):
        queue.tasks["pay"].delay(7)
    queue.set_limit(session, "api", 0)
    queue.set_limit(session, "bank", 5)
    session.commit()

    api, bank = document(queue, "limits")["limits"]

    assert bank == {
        "name": "bank",
        "declared": 2,
        "capacity": 5,
        "is_set": True,
        "held": 0,
        "waiting": 3,
        "period": None,
        "burst": None,
        "is_fair": False,
    }
    assert (api["declared"], api["capacity"], api["period"], api["burst"]) == (60, 0, 3600, 1)
    heading, *told = lines(queue, "limits")
    assert heading.split() == ["limit", "capacity", "held", "waiting"]
    assert "paused (in the code 60 starts in 1 h)" in told[0]
    assert told[1].split()[:7] == ["bank", "5", "at", "once", "(in", "the", "code"]
    assert told[1].split()[-2:] == ["0", "3"]


def test_batches_have_their_progress(queue: PgQueue) -> None:
    add = queue.tasks["add"]
    with queue.session() as session, session.begin():
        with queue.batch(session, "issue 11", meta={"issue": 11}):
            add.enqueue(session, 1)
        with queue.batch(session, "issue 12"):
            add.enqueue(session, 1)
            add.options(delay=timedelta(hours=1)).enqueue(session, 1)
    Worker(queue).run_until_empty(timeout=60)

    heading, newest, _ = lines(queue, "batches")
    both = document(queue, "batches")["batches"]
    [one] = document(queue, "batches", "--limit", "1")["batches"]

    assert heading.split() == ["batch", "name", "outcome", "ended", "failed", "cancelled"]
    assert newest.split()[1:] == ["issue", "12", "open", "1", "of", "2", "0", "0"]
    assert (one["name"], one["outcome"], one["ended"]) == ("issue 12", None, 1)
    assert [each["meta"] for each in both] == [{}, {"issue": 11}]


class TestFailures:
    def test_errors_of_one_kind_are_one_line_and_select_their_jobs(self, queue: PgQueue) -> None:
        for words in ("first", "second\nline"):
            queue.tasks["mail.fail"].delay(words)
        Worker(queue, concurrency=1).run_until_empty(timeout=60)
        queue.tasks["mail.fail"].options(delay=timedelta(hours=1)).delay("later")

        [found] = document(queue, "failures")["failures"]
        heading, line = lines(queue, "failures")
        jobs = document(queue, "jobs", "--error", found["fingerprint"])["jobs"]
        requeued = command(
            queue, *f"requeue --status failed --error {line.split()[-1]} --yes".split()
        )

        assert (found["failed_jobs"], found["attempts"], found["job_id"]) == (2, 2, 2)
        assert (found["error_type"], found["message"]) == ("ValueError", "second\nline")
        assert found["place"].endswith("fail")
        assert heading.split()[:4] == ["failed", "attempts", "task", "error"]
        assert line.split()[:5] == ["2", "2", "mail.fail", "ValueError:", "second"]
        assert [job["id"] for job in jobs] == [2, 1]
        assert requeued.stdout == "2 requeued\n"

    @pytest.mark.parametrize("error", ["12", "x" * 16, "ValueError"])
    def test_what_is_not_printed_by_failures_is_refused_as_an_error(
        self, queue: PgQueue, error: str
    ) -> None:
        refused = command(queue, "jobs", "--error", error)

        assert refused.returncode == 2
        assert f"'{error}' is not an error of `pgqueue failures`" in refused.stderr

    def test_failures_are_filtered_by_task_and_time(self, queue: PgQueue, engine: Engine) -> None:
        queue.tasks["mail.fail"].delay("no")
        Worker(queue).run_until_empty(timeout=60)

        assert len(document(queue, "failures", "--since", "1h")["failures"]) == 1
        assert document(queue, "failures", "--task", "add")["failures"] == []
        with engine.begin() as connection:
            old = "UPDATE pgqueue.error_groups SET last_at = now() - interval '2 hours'"
            connection.execute(text(old))
        assert document(queue, "failures", "--since", "1h")["failures"] == []


class TestStatistics:
    def test_a_line_has_the_attempts_of_a_task_and_their_durations(
        self, queue: PgQueue, engine: Engine
    ) -> None:
        for n in range(3):
            queue.tasks["add"].delay(n)
        queue.tasks["mail.fail"].delay("no")
        Worker(queue).run_until_empty(timeout=60)
        with engine.begin() as connection:
            slow = "UPDATE pgqueue.task_minutes SET ran = '{0,0,0,0,0,0,0,0,0,3}', waited = '{}'"
            connection.execute(text(f"{slow} WHERE task = 'add'"))

        add, fail = document(queue, "stats")["stats"]
        heading, line, _ = lines(queue, "stats", "--since", "30m")
        [alone] = document(queue, "stats", "--task", "mail.fail")["stats"]

        assert (add["task"], add["ended"], add["succeeded"], add["wait_p50"]) == ("add", 3, 3, None)
        assert 0.256 < add["run_p50"] < add["run_p95"] < 0.512
        assert (fail["ended"], fail["failed"], fail["retried"]) == (1, 1, 0)
        assert alone == fail
        assert heading.split() == [
            *("task", "ended", "failed", "retried", "wait", "p50", "wait", "p95"),
            *("run", "p50", "run", "p95"),
        ]
        assert line.split() == ["add", "3", "0", "0", "-", "-", "360", "ms", "490", "ms"]

    def test_a_span_of_time_has_a_unit(self, queue: PgQueue) -> None:
        refused = command(queue, "stats", "--since", "60")

        assert refused.returncode == 2
        assert "'60' is not a span of time, as 90s, 30m, 1h or 7d" in refused.stderr
