"""What Prometheus reads of a worker, and whether the worker lives."""

import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from shop_rig import PATIENCE, pgqueue, running_worker, wait_until, write_shop
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from pgqueue import JobContext, Limit, PgQueue, Retry, Worker
from pgqueue.metrics import MOST_CONNECTIONS, MOST_QUEUES, OTHER, serving
from pgqueue.repository.health import LONGEST_SILENCE
from pgqueue.worker.health import WorkerHealth

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "examples" / "monitoring"
MONITORING_PAGE = ROOT / "docs" / "how-to" / "monitoring.md"


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def samples(port: int) -> dict[tuple[str, ...], float]:
    """Each sample by its name and its labels, as far as it has them."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    labels = ("queue", "task", "outcome", "limit", "kind")
    return {
        (
            sample.name,
            *(sample.labels[name] for name in labels if name in sample.labels),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_attempts_are_counted_by_queue_task_and_committed_outcome(
    queue: PgQueue, engine: Engine
) -> None:
    @queue.task(name="add", queue="sums")
    def add(a: int, b: int) -> int:
        return a + b

    @queue.task(name="fail", max_attempts=2, retry=Retry.constant(timedelta(0)))
    def fail() -> None:
        raise ValueError("no")

    with Session(engine) as session, session.begin():
        add.enqueue_many(session, [(n, n) for n in range(3)])
        fail.enqueue(session)
    worker, registry = Worker(queue), CollectorRegistry()

    with serving(worker, queue, port=0, registry=registry) as port:
        worker.run_until_empty()
        found = samples(port)

    assert found["pgqueue_attempts_ended_total", "sums", "add", "succeeded"] == 3
    assert found["pgqueue_attempts_ended_total", "default", "fail", "retried"] == 1
    assert found["pgqueue_attempts_ended_total", "default", "fail", "failed"] == 1
    assert found["pgqueue_attempts_started_total", "default", "fail"] == 2
    assert found["pgqueue_attempt_run_seconds_count", "sums", "add"] == 3
    assert found["pgqueue_attempt_wait_seconds_count", "sums", "add"] == 3
    assert found[("pgqueue_slots",)] == 10
    assert found[("pgqueue_attempts_stale",)] == 0


def test_depth_and_oldest_due_age_of_each_queue(queue: PgQueue, engine: Engine) -> None:
    @queue.task(queue="mail")
    def send() -> None: ...

    with Session(engine) as session, session.begin():
        send.enqueue(session)
        send.options(delay=timedelta(hours=1)).enqueue(session)
    worker = Worker(queue, ["default"])

    with serving(worker, queue, port=0, registry=CollectorRegistry()) as port:
        found = samples(port)

    assert found["pgqueue_jobs_waiting", "mail"] == 2
    assert found["pgqueue_jobs_due", "mail"] == 1
    assert 0 < found["pgqueue_oldest_due_seconds", "mail"] < PATIENCE


def test_jobs_that_limits_block_are_counted_by_limit_and_age_their_queue(
    queue: PgQueue, engine: Engine
) -> None:
    @queue.task(queue="crm", limit=[Limit(1, by="tenant", name="tenants"), Limit(9, name="crm")])
    def sync(tenant: int) -> None: ...

    with Session(engine) as session, session.begin():
        for tenant in range(3):
            sync.enqueue(session, tenant)
        sync.options(delay=timedelta(hours=1)).enqueue(session, 4)
    worker = Worker(queue, ["default"])

    with serving(worker, queue, port=0, registry=CollectorRegistry()) as port:
        found = samples(port)

    assert found["pgqueue_jobs_blocked", "crm", "tenants"] == 4
    assert found["pgqueue_jobs_blocked", "crm", "crm"] == 4
    assert 0 < found["pgqueue_oldest_blocked_seconds", "crm", "crm"] < PATIENCE
    assert found["pgqueue_oldest_due_seconds", "crm"] > 0
    assert ("pgqueue_jobs_due", "crm") not in found  # no worker could start one


def test_what_waits_for_jobs_and_signals_is_counted_with_the_open_batches(
    queue: PgQueue, engine: Engine
) -> None:
    @queue.task(name="note")
    def note(word: str) -> None: ...

    @queue.task(name="tell")
    def tell(batch_id: int) -> None: ...

    @queue.task(name="wait")
    def wait(ctx: JobContext, key: int) -> None:
        ctx.wait_for("paid", key)

    @queue.task(name="gather")
    def gather(ctx: JobContext) -> None:
        ctx.gather("notes", [note.options(delay=timedelta(hours=1)).job("later")])

    with Session(engine) as session, session.begin():
        waits = wait.enqueue_many(session, [(key,) for key in range(3)])
        gather.enqueue(session)
        with queue.workflow(session, on_success=tell) as flow:
            first = flow.add(note.options(delay=timedelta(hours=1)).job("first"))
            parts = flow.add_many(note, [("a",), ("b",)], after=first)
            flow.add(note.job("last"), after=parts)
    worker = Worker(queue)
    worker.run_until_empty()
    with Session(engine) as session, session.begin():
        queue.cancel(session, waits[0])  # its wait stays on record

    with serving(worker, queue, port=0, registry=CollectorRegistry()) as port:
        found = samples(port)

    assert found[("pgqueue_jobs_waiting_for_signals",)] == 2
    # Two parts, the last job, the callback, and the one that gathers.
    assert found[("pgqueue_jobs_waiting_for_jobs",)] == 5
    assert found["pgqueue_batches_open", "workflow"] == 1  # its group is none of its own
    assert found["pgqueue_batches_open", "batch"] == 1
    assert 0 < found["pgqueue_oldest_batch_seconds", "workflow"] < PATIENCE


def test_the_metrics_of_batches_are_zero_if_none_is_open(queue: PgQueue) -> None:
    with serving(Worker(queue), queue, port=0, registry=CollectorRegistry()) as port:
        found = samples(port)

    for kind in ("batch", "workflow"):
        assert found["pgqueue_batches_open", kind] == 0
        assert found["pgqueue_oldest_batch_seconds", kind] == 0
    assert found[("pgqueue_jobs_waiting_for_jobs",)] == 0


def test_clients_that_send_nothing_take_few_threads_and_keep_nobody_out(queue: PgQueue) -> None:
    with (
        serving(Worker(queue), queue, port=0, registry=CollectorRegistry()) as port,
        ExitStack() as idle,
    ):
        before = set(threading.enumerate())
        for _ in range(10 * MOST_CONNECTIONS):
            idle.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))

        assert samples(port)
        assert len(set(threading.enumerate()) - before) <= MOST_CONNECTIONS


def test_only_the_largest_queues_have_series_of_their_own(queue: PgQueue, engine: Engine) -> None:
    @queue.task(name="send")
    def send() -> None: ...

    names = [f"q{number}" for number in range(MOST_QUEUES + 2)]
    with Session(engine) as session, session.begin():
        for name in names:
            send.options(queue=name).enqueue(session)
        send.options(queue="q7").enqueue(session)
        send.options(queue=OTHER).enqueue_many(session, [()] * 3)
    worker, registry = Worker(queue, [*names, OTHER]), CollectorRegistry()

    with serving(worker, queue, port=0, registry=registry) as port:
        waiting = {key[1]: count for key, count in samples(port).items() if key[0] == WAITING}
        worker.run_until_empty(timeout=60)
        ended = {key[1]: count for key, count in samples(port).items() if key[0] == ENDED}

    assert (len(waiting), waiting["q7"], waiting[OTHER]) == (MOST_QUEUES + 1, 2, 5)
    assert (len(ended), sum(ended.values())) == (MOST_QUEUES + 1, MOST_QUEUES + 6)


WAITING, ENDED = "pgqueue_jobs_waiting", "pgqueue_attempts_ended_total"


def test_metrics_are_served_without_a_database(queue: PgQueue) -> None:
    queue.bind("postgresql://nobody@127.0.0.1:1/none")

    with serving(Worker(queue), queue, port=0, registry=CollectorRegistry()) as port:
        assert not [name for name, *_ in samples(port) if name.startswith("pgqueue_jobs")]


def test_a_worker_is_live_while_it_looks_for_jobs(queue: PgQueue) -> None:
    worker = Worker(queue)
    with serving(worker, queue, port=0, registry=CollectorRegistry()) as port:
        with pytest.raises(HTTPError, match="503"):
            urlopen(f"http://127.0.0.1:{port}/healthz", timeout=PATIENCE)
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            wait_until(lambda: worker.health() is not None)
            with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=PATIENCE) as answer:
                assert answer.read() == b"live: 0 of 10 slots are busy\n"
        finally:
            worker.stop()
            thread.join()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"heartbeat_age": LONGEST_SILENCE + 1}, "no heartbeat was acknowledged"),
        ({"claim_age": LONGEST_SILENCE + 1}, "has not looked for jobs"),
        ({"claim_age": LONGEST_SILENCE + 1, "busy": 2}, None),
    ],
)
def test_a_worker_is_live_unless_it_is_silent(changed: dict[str, Any], problem: str | None) -> None:
    state = {"slots": 2, "busy": 1, "heartbeat_age": 0.1, "claim_age": 0.1, "stale": 0}

    found = WorkerHealth(**(state | changed)).problems

    assert [bool(re.search(problem or "", words)) for words in found] == [True] * bool(problem)


@pytest.mark.journey
class TestCommands:
    @pytest.fixture
    def shop(self, tmp_path: Path) -> Path:
        return write_shop(tmp_path)

    @pytest.fixture
    def port(self, shop: Path, database_url: str) -> Iterator[int]:
        """The port of a worker that another process runs."""
        options = ("--metrics-port", str(free_port()))
        with running_worker(shop, database_url, *options) as worker:
            assert worker.stderr is not None
            for line in worker.stderr:
                if "serves /metrics" in line:
                    break
            yield int(options[1])

    def test_a_worker_of_the_command_line_answers(self, port: int) -> None:
        wait_until(lambda: is_live(port))

    def test_a_port_that_is_taken_ends_the_worker(
        self, shop: Path, database_url: str, port: int
    ) -> None:
        ended = pgqueue(
            shop, "--app", "shop:queue", "worker", "--metrics-port", str(port),
            database_url=database_url,
        )  # fmt: skip

        assert ended.returncode == 1
        assert f"Port {port} cannot be used for metrics" in ended.stderr
        assert "give another --metrics-port" in ended.stderr

    def test_a_port_beyond_the_last_one_is_refused_in_words(
        self, shop: Path, database_url: str
    ) -> None:
        ended = pgqueue(
            shop, "--app", "shop:queue", "worker", "--metrics-port", "65535",
            database_url=database_url, PGQUEUE_PLACE="1",
        )  # fmt: skip

        assert ended.returncode == 1
        assert "Port 65536 cannot be used for metrics" in ended.stderr

    def test_each_of_several_processes_has_a_port(self, shop: Path, database_url: str) -> None:
        first = free_port()
        options = ("--processes", "2", "--metrics-port", str(first))
        with running_worker(shop, database_url, *options):
            for port in (first, first + 1):
                wait_until(partial(is_live, port))

    def test_status_tells_the_age_of_the_oldest_due_job(
        self, shop: Path, engine: Engine, database_url: str
    ) -> None:
        queue = PgQueue(engine)

        @queue.task(name="shop.add")
        def add() -> None: ...

        with Session(engine) as session, session.begin():
            add.enqueue(session)
        ended = pgqueue(shop, "--url", database_url, "status", "--json")

        (found,) = json.loads(ended.stdout)["queues"]
        assert 0 < found["oldest_due_age"] < PATIENCE


def is_live(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=PATIENCE) as answer:
            return "slots are busy" in answer.read().decode()
    except OSError:
        return False


def free_port() -> int:
    import socket

    with socket.socket() as chosen, socket.socket() as behind:
        chosen.bind(("127.0.0.1", 0))
        port = int(chosen.getsockname()[1])
        try:
            behind.bind(("127.0.0.1", port + 1))
        except OSError:
            return free_port()
    return port


class TestMonitoringFiles:
    @pytest.fixture
    def known(self, queue: PgQueue) -> set[str]:
        """The names of all metrics that a worker serves."""
        worker = Worker(queue)
        with serving(worker, queue, port=0, registry=CollectorRegistry()) as port:
            worker.run_until_empty()
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
                return set(re.findall(r"^# TYPE (\w+)", answer.read().decode(), re.MULTILINE))

    @pytest.mark.parametrize("file", ["alerts.yml", "dashboard.json"])
    def test_monitoring_files_ask_only_for_metrics_that_exist(
        self, known: set[str], file: str
    ) -> None:
        asked = set(re.findall(r"\bpgqueue_\w+", (DEPLOY / file).read_text()))
        suffixes = ("", "_bucket", "_count", "_sum")

        assert asked
        assert asked <= {f"{name}{suffix}" for name in known for suffix in suffixes}

    def test_the_table_of_the_manual_has_all_metrics(self, known: set[str]) -> None:
        page = MONITORING_PAGE.read_text("utf-8")
        rows = [line for line in page.splitlines() if line.startswith("| `pgqueue_")]
        names = {name for row in rows for name in re.findall(r"`(pgqueue_\w+)`", row)}

        assert names == {name for name in known if not name.endswith("_created")}

    def test_the_grafana_dashboard_is_json_with_a_query_for_each_panel(self) -> None:
        dashboard = json.loads((DEPLOY / "dashboard.json").read_text())

        assert all(panel["targets"] for panel in dashboard["panels"])

    @pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
    def test_prometheus_accepts_rules_and_configuration(self) -> None:
        subprocess.run(["promtool", "check", "rules", str(DEPLOY / "alerts.yml")], check=True)
        subprocess.run(["promtool", "check", "config", str(DEPLOY / "prometheus.yml")], check=True)

    @pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
    def test_a_prometheus_scrapes_a_worker(self, queue: PgQueue, tmp_path: Path) -> None:
        listen = free_port()
        with serving(Worker(queue), queue, port=0, registry=CollectorRegistry()) as port:
            config = tmp_path / "prometheus.yml"
            config.write_text(
                "scrape_configs:\n- job_name: pgqueue\n  scrape_interval: 1s\n"
                f"  static_configs: [{{targets: ['127.0.0.1:{port}']}}]\n"
            )
            with subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={tmp_path / 'data'}",
                    f"--web.listen-address=127.0.0.1:{listen}",
                ],
                stderr=subprocess.DEVNULL,
            ) as server:
                try:
                    wait_until(lambda: is_up(listen))
                finally:
                    server.terminate()


def is_up(port: int) -> bool:
    """Whether Prometheus has scraped its one target."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/query?query=up", timeout=PATIENCE) as answer:
            found = json.load(answer)["data"]["result"]
    except OSError:
        return False
    return [one["value"][1] for one in found] == ["1"]
