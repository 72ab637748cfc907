"""How long the pages and actions of the dashboard take, beside many ended and waiting jobs, and
how much those who look at them slow down a worker."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from subprocess import Popen
from threading import Event
from typing import Any

import psycopg
import sqlalchemy as sa
from werkzeug.test import Client, TestResponse

from benchmarks.arena import Arena, Spoiled
from benchmarks.case import Bench, Finding, Size, case
from benchmarks.systems import PGQUEUE
from pgqueue import PgQueue
from pgqueue.dashboard import RIGHTS, Access
from pgqueue.repository.error_groups import in_hex
from pgqueue.repository.queue_minutes import QueueMinutes
from pgqueue.repository.task_minutes import TaskMinutes

REPEATS = 30
"""How often each page is asked for, at most."""
WEEK = 7 * 24 * 60
"""Minutes."""
SPENT = 0.02
"""Seconds that each waiting job runs, so that the worker is busy until the end."""
FINGERPRINT = 7
LEFT_OUT = "took too long and is left out"
TOKEN = re.compile(r'name="csrf" value="([^"]+)"')
LOOKED_AT = ("/", "/jobs")
"""The page that each viewer has open."""
REFRESHED_EVERY = 5.0
"""Seconds: as an open page does it."""
DRAINED = 400_000
"""Jobs of one drain, at most: it should take longer than a page stands."""
PORTION = 100
"""How many failed jobs the filter of an action on many jobs matches."""

# The job with the lowest number is the oldest; all have been enqueued within the last day.  One of
# a hundred has failed, one of a thousand has a tag.
ENDED = """
    INSERT INTO pgqueue.jobs (queue, task, args, run_at, created_at, started_at, finished_at,
        attempts, outcome, last_error, tags)
    SELECT 'queue' || number %% 10, 'nothing', jsonb_build_object('number', number), at, at, at,
        at + interval '1 second', 1,
        CASE WHEN number %% 100 = 0 THEN 'failed' ELSE 'succeeded' END,
        CASE WHEN number %% 100 = 0 THEN 'no answer to request ' || number END,
        CASE WHEN number %% 1000 = 0 THEN '["vip"]'::jsonb END
    FROM generate_series(1, %(ended)s) AS number,
        LATERAL (SELECT now() - interval '1 day' * (1 - number::float / %(ended)s)) AS time (at)
    ORDER BY number
"""
INSERT_WAITING = """
    WITH job AS (
        INSERT INTO pgqueue.jobs (task, args, run_at, priority)
        %s
        RETURNING id, queue, priority, run_at, task
    )
    INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task)
    SELECT queue, priority, run_at, id, task FROM job
"""
WAITING = (
    INSERT_WAITING
    % """
    SELECT 'nothing', jsonb_build_object('number', 0, 'seconds', %(seconds)s::float),
        clock_timestamp() + delay, 5
    FROM (VALUES (interval '0', %(due)s), (interval '1 day', %(due)s / 10)) AS part (delay, jobs),
        generate_series(1, part.jobs)
"""
)
# More urgent than the others, so that a worker drains them first.
URGENT = (
    INSERT_WAITING
    % """
    SELECT 'nothing', jsonb_build_object('number', number), clock_timestamp(), 0
    FROM generate_series(%(first)s, %(first)s + %(jobs)s - 1) AS number
"""
)
BESIDE = (
    """
    INSERT INTO pgqueue.dead_letters (job_id, outcome, queue, task, finished_at, fingerprint)
    SELECT id, outcome, queue, task, finished_at, 1 + id / 100 %% 20
    FROM pgqueue.jobs WHERE outcome = 'failed'
    """,
    """
    INSERT INTO pgqueue.job_attempts
        (job_id, message_id, attempt, outcome, error_type, error, traceback, started_at)
    SELECT id, id, 1, 'failed', 'TimeoutError', last_error, repeat('at a line' || chr(10), 40),
        started_at
    FROM pgqueue.jobs WHERE outcome = 'failed'
    """,
    """
    INSERT INTO pgqueue.error_groups (fingerprint, task, error_type, place, attempts, first_at,
        last_at, job_id, message)
    SELECT fingerprint, task, 'TimeoutError', 'shop.send', count(*), min(finished_at), now(),
        max(job_id), 'no answer'
    FROM pgqueue.dead_letters GROUP BY fingerprint, task
    """,
    """
    INSERT INTO pgqueue.task_minutes (at, task, succeeded, failed, ran, waited)
    SELECT date_trunc('minute', now()) - minute * interval '1 minute', 'task' || task, 40, 1,
        array_fill(2, ARRAY[20]), array_fill(2, ARRAY[20])
    FROM generate_series(1, %(minutes)s) AS minute, generate_series(1, 10) AS task
    """,
    """
    INSERT INTO pgqueue.queue_minutes
        (at, queue, counted_at, waiting, due, blocked, running, oldest_due_s, started)
    SELECT at, 'queue' || queue, at, 50, 40, 0, 4, 9, 41
    FROM generate_series(1, %(minutes)s) AS minute, generate_series(0, 9) AS queue,
        LATERAL (SELECT date_trunc('minute', now()) - minute * interval '1 minute') AS time (at)
    """,
    "INSERT INTO pgqueue.batches (name) SELECT 'batch' FROM generate_series(1, 50)",
    """
    INSERT INTO pgqueue.batch_jobs (batch_id, job_id)
    SELECT 1 + target_id %% 50, target_id FROM pgqueue.message_queue ORDER BY id LIMIT 50000
    """,
    """
    INSERT INTO pgqueue.operator_actions (actor, action, finished_at)
    SELECT 'ann', 'requeue', now() FROM generate_series(1, 10000)
    """,
    """
    INSERT INTO pgqueue.schedules (name, task, every, next_at)
    SELECT 'schedule' || number, 'nothing', interval '1 day', now() + interval '1 day'
    FROM generate_series(1, 100) AS number
    """,
)
TABS = ("running", "due", "scheduled", "retrying", "blocked", "failed", "succeeded", "cancelled")


@case(
    smoke=Size(rows=5_000, jobs=500),
    usual=Size(rows=1_000_000, jobs=100_000, turns=2),
    full=Size(rows=10_000_000, jobs=1_000_000, turns=4),
)
def pages(bench: Bench, size: Size) -> Finding:
    """The pages and actions of the dashboard beside ended jobs, a hundredth of them failed, while a
    worker runs due jobs and two users look at pages.  Then drains with and without these users."""
    finding = Finding()
    repeats = min(REPEATS, size.rows // 5_000)
    drained = min(DRAINED, size.rows // 3)
    with bench.arena(PGQUEUE) as arena:
        fill(arena, size)
        arena.prepare_starts(size.rows + 1 + 2 * size.turns * drained)
        with arena.workers() as processes:
            arena.wait_for_starts(1, processes)
            client, addresses = client_of(arena.url), addresses_of(arena, size)
            with _viewers(arena.url), _frozen():
                times, late = _times_of_pages(client, addresses, repeats)
                times |= _times_of_actions(client, size, repeats)
            # Last: it leaves millions of dead rows, which pages pass over until the next vacuum.
            _drain(arena, processes, size, drained, finding)
    finding.remarks += ["| page or action | median, ms | 95th percentile, ms |", "|---|---|---|"]
    slow = {name: _percentile(each) for name, each in times.items()}
    for name in sorted(times, key=lambda name: -slow[name]):
        median = statistics.median(times[name])
        finding.remarks.append(f"| `{name}` | {median:.0f} | {slow[name]:.0f} |")
    finding.remarks.append("")
    for what, is_action in (("page", False), ("action", True)):
        slowest = max(slow[name] for name in times if name.startswith("POST ") is is_action)
        finding.bound(finding.add(f"the slowest {what}", [slowest], "ms"), at_most=100)
    finding.remarks += [f"`{one}` has left out a part that took too long." for one in sorted(late)]
    return finding


def fill(arena: Arena, size: Size) -> None:
    """One day of ended jobs, a week of statistics, and jobs that wait."""
    given = {"ended": size.rows, "due": size.jobs, "seconds": SPENT}
    given["minutes"] = min(size.rows, WEEK)
    with psycopg.connect(arena.url, autocommit=True) as connection:
        for statement in (ENDED, WAITING, *BESIDE):
            connection.execute(statement.encode(), given)
    engine = sa.create_engine(arena.url.replace("postgresql:", "postgresql+psycopg:"))
    for minutes in (TaskMinutes, QueueMinutes):
        has_more = True
        while has_more:  # as the workers of this week would have folded them
            with engine.begin() as session:
                has_more = minutes(session).prune()
    engine.dispose()
    with psycopg.connect(arena.url, autocommit=True) as connection:
        # Folded minute by minute, the tables would have no pages without rows.
        connection.execute("VACUUM FULL pgqueue.task_minutes, pgqueue.queue_minutes")
    arena.calm()


def client_of(url: str) -> Client:
    """Asks for pages as a user who may do everything."""
    queue = PgQueue(url)

    @queue.task(name="nothing")
    def nothing(number: int, seconds: float = 0) -> None: ...

    access = Access(user="ann", rights=RIGHTS)
    return Client(queue.dashboard(authorize=lambda request: access, secret="of the benchmark").wsgi)


@contextmanager
def _frozen() -> Iterator[None]:
    """Full garbage collections pass over what is there already, as in ``pgqueue dashboard``."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _viewers(url: str) -> Iterator[None]:
    """Two users who have a page open, which refreshes itself."""
    over = Event()

    def view(address: str, client: Client) -> None:
        while not over.wait(REFRESHED_EVERY):
            _checked(address, client.get(address))

    clients = {address: client_of(url) for address in LOOKED_AT}
    for address, client in clients.items():
        _checked(address, client.get(address))
    with ThreadPoolExecutor(len(clients)) as threads:
        views = [threads.submit(view, *each) for each in clients.items()]
        try:
            yield
        finally:
            over.set()
    for each in views:
        each.result()


def _drain(
    arena: Arena, processes: Sequence[Popen[bytes]], size: Size, jobs: int, finding: Finding
) -> None:
    """Have a worker drain jobs that are more urgent than those that wait, without viewers and with
    them."""
    first = size.rows + 1

    def rate() -> float:
        nonlocal first
        given = {"first": first, "jobs": jobs}
        with psycopg.connect(arena.url, autocommit=True) as connection:
            connection.execute(URGENT.encode(), given)
        arena.wait_for_starts(jobs, processes, first=first)
        starts = [arena.starts.of(number)[0] for number in range(first, first + jobs)]
        first += jobs
        return jobs / (max(starts) - min(starts))

    alone, watched = list[float](), list[float]()
    for turn in range(size.turns):
        for is_watched in (turn % 2 == 0, turn % 2 == 1):
            if is_watched:
                with _viewers(arena.url):
                    watched.append(rate())
            else:
                alone.append(rate())
    ours = finding.add("drain with two viewers", watched, "jobs/s")
    finding.ratio(ours, finding.add("drain without viewers", alone, "jobs/s"), at_least=0.98)


def addresses_of(arena: Arena, size: Size) -> Sequence[str]:
    """All pages; the filters find many jobs, few, or one that is far back."""
    [[last]] = arena.sql("SELECT max(target_id) FROM pgqueue.message_queue")
    filters = [f"status:{tab}" for tab in TABS]
    filters += ["task:nothing", "task:unknown", "queue:queue3", "tag:vip", "error:request"]
    filters += [f"arg.number:{size.rows}", "arg.number:1", "arg.number:-1", "tag:none"]
    filters += ["error:nowhere", "status:failed error:nowhere", "took:>1h", "key:none"]
    filters += ["created:<12h", "created:>1h", "created:<2d created:>1d", "batch:1"]
    filters += [f"error:{in_hex(FINGERPRINT)}", "status:due tag:vip", "status:scheduled tag:vip"]
    group = f"/failures/{FINGERPRINT}?task=nothing"
    return [
        *("/", "/?span=day", "/?span=week", "/live", "/jobs", f"/jobs?before={size.rows // 2}"),
        *(f"/jobs?q={line}" for line in filters),
        *("/jobs.csv?q=status:failed", "/jobs/1", f"/jobs/{size.rows}", f"/jobs/{last}"),
        *(f"/jobs/{last}/edit", "/tasks/nothing/enqueue"),
        *("/failures", "/failures?span=all", group),
        *("/actions/preview?action=requeue&q=status:failed", "/queues", "/tasks"),
        *("/tasks?span=day", "/tasks?span=week", "/tasks/task1", "/tasks/task1?span=week"),
        "/schedules",
        *("/batches", "/batches/1", "/workers", "/log", "/log/1", "/you"),
    ]


def _times_of_pages(
    client: Client, addresses: Sequence[str], repeats: int
) -> tuple[dict[str, list[float]], set[str]]:
    """Milliseconds of each page, so often, one after the other; and the pages that have left out a
    part."""
    times: dict[str, list[float]] = {address: [] for address in addresses}
    late = set()
    for _ in range(repeats):
        for address, taken in times.items():
            began = time.perf_counter()
            response = client.get(address)
            taken.append(1000 * (time.perf_counter() - began))
            _checked(address, response)
            if LEFT_OUT in response.text:
                late.add(address)
    return times, late


def _times_of_actions(client: Client, size: Size, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each action, so often, each time on other jobs."""
    token = TOKEN.findall(client.get("/you").text)[0]
    apart = min(100 * PORTION, size.rows // (2 * repeats))
    times: dict[str, list[float]] = {}
    for number in range(repeats):
        one = size.rows - number * 20 * 100  # another group than that of the third action
        some = f"status:failed after:{number * apart + 1} before:{(number + 1) * apart + 1}"
        actions: Sequence[tuple[str, str, Mapping[str, Any]]] = (
            ("one job", "/actions/requeue", {"action": "requeue", "id": one}),
            (f"{PORTION} that match", "/actions/requeue", {"action": "requeue", "q": some}),
            ("the newest of a group", f"/failures/{FINGERPRINT}/try", {"task": "nothing"}),
            ("", "/queues/pause", {"queue": "queue3"}),
            ("", "/queues/resume", {"queue": "queue3"}),
            ("", "/tasks/pause", {"task": "task1"}),
            ("", "/tasks/resume", {"task": "task1"}),
        )
        for what, address, form in actions:
            began = time.perf_counter()
            response = client.post(address, data={"csrf": token, **form})
            taken = 1000 * (time.perf_counter() - began)
            times.setdefault(f"POST {address} {what}".strip(), []).append(taken)
            _checked(address, response)
    return times


def _checked(address: str, response: TestResponse) -> None:
    if response.status_code >= 400:
        raise Spoiled(f"{address}: {response.status}")


def _percentile(times: Sequence[float]) -> float:
    """The 95th: a twentieth took longer."""
    return sorted(times)[len(times) - 1 - len(times) // 20]
