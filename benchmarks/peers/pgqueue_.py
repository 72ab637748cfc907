"""pgqueue, by its public calls and with its defaults.

Options: ``handler`` (sync, async, transactional, process), ``concurrency``, ``notify``, ``poll``,
``padding`` (bytes that each payload carries along), ``limit`` (how many jobs of a key run at once),
``strict`` (whether they run in order), ``burst`` (``limit`` jobs start in a second, and so many at
once), ``keys`` (over which the jobs are spread), ``fair`` (whether the keys take turns),
``seconds`` (for which each job of a bulk runs), ``batch`` (whether the jobs of a bulk are one
batch), ``graph`` (they are a workflow: "fan", all but two between the first and the last; "chain",
each after the one before; "steps", they are the steps of one job), ``callback`` (the number of the
callback of the batch), ``statistics`` (whether the worker counts its attempts), ``queues`` (over
which the jobs are spread; the worker serves all).
"""

import time
from contextlib import nullcontext
from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks.peers.protocol import (
    Adapter,
    Tables,
    main,
    note_start,
    option,
    url,
    wait_for_the_others,
)
from pgqueue import JobContext, Limit, PgQueue, Worker

NOTIFY = option("notify", True)
queue = PgQueue(url(), notify=NOTIFY)

EFFECT = sa.insert(sa.table("effects", sa.column("job")))
PADDING = option("padding", 0)
KEYS = option("keys", 0)
LIMIT = option("limit", None)
BURST = option("burst", None)
MORE = {"order": "strict" if option("strict", False) else "any"}
if BURST is not None:
    MORE = {"per": timedelta(seconds=1), "burst": BURST}
QUEUES = option("queues", 0)
SECONDS = option("seconds", 0)
CALLBACK = option("callback", None)
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'pgqueue'"
EVERYTHING = "jobs, message_queue, leases, job_attempts, dead_letters"
EVERYTHING += ", waiting_messages, limit_places, limit_buckets"
EVERYTHING += ", batches, batch_jobs, blocked, dependencies, job_steps, task_minutes, error_groups"


if option("handler", "sync") == "sync":

    @queue.task(
        name="nothing",
        limit=() if LIMIT is None else Limit(LIMIT, by="key", **MORE),
        fair_by="key" if option("fair", False) else (),
    )
    def nothing(
        number: int, today: int = 0, padding: str = "", seconds: float = 0, key: int = 0
    ) -> None:
        note_start(number)
        if seconds:
            time.sleep(seconds)

elif option("handler", "sync") == "async":

    @queue.task(name="nothing")
    async def nothing(number: int) -> None:
        note_start(number)

elif option("handler", "sync") == "process":

    @queue.task(name="nothing", executor="process")
    def nothing(number: int) -> None:
        note_start(number)

else:

    @queue.task(name="nothing")
    def nothing(session: Session, number: int) -> None:
        note_start(number)
        session.execute(EFFECT, {"job": number})


@queue.task(name="steps")
def steps(ctx: JobContext, first: int, jobs: int) -> None:
    for number in range(first, first + jobs):
        ctx.step(f"step {number}", note_start, number)


@queue.task(name="callback")
def callback(batch_id: int) -> None:
    note_start(CALLBACK)


def in_batch(session):
    if not option("batch", False):
        return nullcontext()
    return queue.batch(session, "all", on_success=None if CALLBACK is None else callback)


def fan(flow, rows):
    root = flow.add(nothing.job(**rows[0]))
    parts = flow.add_many(nothing, rows[1:-1], after=root)
    flow.add(nothing.job(**rows[-1]), after=parts)


def chain(flow, rows):
    last = ()
    for row in rows:
        last = flow.add(nothing.job(**row), after=last)


GRAPHS = {"fan": fan, "chain": chain}


class PgqueueAdapter(Tables, Adapter):
    def setup(self):
        queue.upgrade()
        self.sql("CREATE TABLE IF NOT EXISTS effects (job bigint)")

    def empty(self):
        # Another commit, measured beside this one, may not have all of these tables.
        there = {name for (name,) in self.sql(TABLES)}
        names = [name.strip() for name in EVERYTHING.split(",") if name.strip() in there]
        tables = ", ".join(f"pgqueue.{name}" for name in names)
        self.sql(f"TRUNCATE {tables}, effects")

    def enqueue(self, number):
        self.task.delay(number, **self.arguments)

    def do_each(self, first, jobs, gap, priority=None, notify=NOTIFY, key=None):
        queue.notify = notify
        self.arguments = {} if key is None else {"key": key}
        options = {} if priority is None else {"priority": priority}
        self.task = nothing.options(**options)  # which reads whether the queue notifies
        return self.enqueue_each(first, jobs, gap)

    def enqueue_bulk(self, first, jobs):
        more = {"padding": "x" * PADDING} if PADDING else {}
        more |= {"seconds": SECONDS} if SECONDS else {}
        rows = [{"number": number, **more} for number in range(first, first + jobs)]
        if KEYS:
            rows = [{**row, "key": row["number"] % KEYS} for row in rows]
        self.enqueue_rows(rows)

    def do_blocked(self, first, jobs, seconds):
        """Jobs of a key that no other job has; the first of them runs for so long."""
        rows = [{"number": number, "key": -1} for number in range(first, first + jobs)]
        rows[0]["seconds"] = seconds
        self.enqueue_rows(rows)

    def enqueue_rows(self, rows):
        graph = option("graph", None)
        with queue.session() as session, session.begin():
            if graph == "steps":
                steps.enqueue(session, rows[0]["number"], len(rows))
            elif graph:
                with queue.workflow(session) as flow:
                    GRAPHS[graph](flow, rows)
            else:
                with in_batch(session):
                    for number in range(max(QUEUES, 1)):
                        of_queue = nothing.options(queue=f"tenant-{number}") if QUEUES else nothing
                        of_queue.enqueue_many(session, rows[number :: max(QUEUES, 1)])

    def left(self):
        return self.sql("SELECT count(*) FROM pgqueue.jobs WHERE outcome IS NULL")[0][0]

    def work(self):
        worker = Worker(
            queue,
            queues=["*"] if QUEUES else ["default"],
            concurrency=option("concurrency", 10),
            poll_interval=timedelta(seconds=option("poll", 1.0)),
            statistics=option("statistics", True),
            max_jobs_per_child=1,
        )
        wait_for_the_others()
        worker.run()


if __name__ == "__main__":
    main(PgqueueAdapter)
