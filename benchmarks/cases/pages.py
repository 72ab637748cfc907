"""How long the pages of the dashboard take, beside many ended and waiting jobs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import psycopg
from werkzeug.test import Client

from benchmarks.arena import Arena, Spoiled
from benchmarks.case import Bench, Finding, Size, case
from benchmarks.systems import PGQUEUE
from pgqueue import PgQueue
from pgqueue.dashboard import RIGHTS, Access
from pgqueue.repository.error_groups import in_hex

REPEATS = 20
"""How often each page is asked for in a turn."""
WEEK = 7 * 24 * 60
"""Minutes."""
SPENT = 0.02
"""Seconds that each waiting job runs, so that the worker is busy until the end."""
FINGERPRINT = 7
LEFT_OUT = "took too long and is left out"

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
WAITING = """
    WITH job AS (
        INSERT INTO pgqueue.jobs (task, args, run_at)
        SELECT 'nothing', jsonb_build_object('number', 0, 'seconds', %(seconds)s::float),
            clock_timestamp() + delay
        FROM (VALUES (interval '0', %(due)s), (interval '1 day', %(due)s / 10))
                AS part (delay, jobs),
            generate_series(1, part.jobs)
        RETURNING id, queue, priority, run_at, task
    )
    INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task)
    SELECT queue, priority, run_at, id, task FROM job
"""
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
    smoke=Size(rows=2_000, jobs=500),
    usual=Size(rows=1_000_000, jobs=100_000),
    full=Size(rows=10_000_000, jobs=1_000_000, turns=3),
)
def pages(bench: Bench, size: Size) -> Finding:
    """The pages of the dashboard beside ended jobs, a hundredth of them failed, and due jobs, while
    a worker runs these."""
    finding = Finding()
    with bench.arena(PGQUEUE) as arena:
        fill(arena, size)
        client, addresses = client_of(arena), addresses_of(arena, size)
        with arena.workers() as processes:
            arena.wait_for_starts(1, processes)
            repeats = min(REPEATS, size.rows // 1000)
            turns = [_turn(client, addresses, repeats) for _ in range(size.turns)]
            late = [one for one in addresses if LEFT_OUT in client.get(one).text]
    finding.remarks += ["| page | median, ms | 95th percentile, ms |", "|---|---|---|"]
    slow = {}
    for address in addresses:
        times = [one for turn in turns for one in turn[address]]
        slow[address] = _percentile(times)
        median = statistics.median(times)
        finding.remarks.append(f"| `{address}` | {median:.0f} | {slow[address]:.0f} |")
    finding.remarks.append("")
    finding.bound(finding.add("the slowest page", [max(slow.values())], "ms"), at_most=100)
    finding.remarks += [f"{one} has left out a part that took too long." for one in late]
    return finding


def fill(arena: Arena, size: Size) -> None:
    """One day of ended jobs, a week of statistics, and jobs that wait."""
    given = {"ended": size.rows, "due": size.jobs, "seconds": SPENT}
    given["minutes"] = min(size.rows, WEEK)
    arena.prepare_starts(1)
    with psycopg.connect(arena.url, autocommit=True) as connection:
        for statement in (ENDED, WAITING, *BESIDE):
            connection.execute(statement.encode(), given)
    arena.calm()


def client_of(arena: Arena) -> Client:
    """Asks for pages as a user who may do everything."""
    queue = PgQueue(arena.url)

    @queue.task(name="nothing")
    def nothing(number: int, seconds: float = 0) -> None: ...

    access = Access(user="ann", rights=RIGHTS)
    return Client(queue.dashboard(authorize=lambda request: access, secret="of the benchmark").wsgi)


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
        *("/tasks?span=week", "/tasks/task1", "/tasks/task1?span=week", "/schedules"),
        *("/batches", "/batches/1", "/workers", "/log", "/log/1", "/you"),
    ]


def _turn(client: Client, addresses: Sequence[str], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each page, so often, one after the other."""
    times: dict[str, list[float]] = {address: [] for address in addresses}
    for _ in range(repeats):
        for address, taken in times.items():
            began = time.perf_counter()
            response = client.get(address)
            taken.append(1000 * (time.perf_counter() - began))
            if response.status_code != 200:
                raise Spoiled(f"{address}: {response.status}")
    return times


def _percentile(times: Sequence[float]) -> float:
    """The 95th: a twentieth took longer."""
    return sorted(times)[len(times) - 1 - len(times) // 20]
