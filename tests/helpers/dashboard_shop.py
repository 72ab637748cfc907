"""A shop with jobs in every state, for tests that look at the dashboard in a browser."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from threading import Event, Thread
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from chaos.workers import wait_until
from pgqueue import Job, JobContext, Limit, PgQueue, Retry, Worker
from pgqueue.models import OperatorAction
from pgqueue.rules.histogram import MOST_BUCKETS

AT_ONCE = Retry.constant(timedelta(0))
LATER = Retry.constant(timedelta(minutes=20))
BEFORE, AFTER = "9f2e11c", "a1b2c3d"
"""The versions of the application; the second one has the fault."""

LAST_RUN = 150
"""The receipts of later orders are not sent before the end."""
BACKLOG = 1600

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>",
    "\"'><svg onload=window.hacked=1> {{ 7 * 7 }} javascript:window.hacked=1",
    "\u202edesrever\u202c \u2066isolate\u2069 \x1b[31mred\x1b[0m \x07\x08\r\n\ttab",
    "long" * 2000,
    "e\u0301" * 30 + "\U0001f3f3\ufe0f\u200d\U0001f308\ufffe",
)


class Unreachable(ConnectionError): ...


class Shop:
    """The application, and the gate at which its running jobs wait."""

    def __init__(self, engine: Engine, version: str) -> None:  # noqa: C901  # its tasks
        self.gate = Event()
        self.queue = queue = PgQueue(
            engine, version=version, secret="of the shop", max_payload_bytes=2_000_000
        )
        gate = self.gate

        @queue.task(name="send_receipt", queue="mail", max_attempts=2, retry=AT_ONCE)
        def send_receipt(order_id: int, address: str, language: str = "en") -> None:
            if order_id > LAST_RUN:
                gate.wait()
            if version == AFTER and order_id % 3:
                raise Unreachable(f"503 Service Unavailable from mail.example, request {order_id}")

        @queue.task(name="charge_card", max_attempts=1, secret_args=["card"])
        def charge_card(order_id: int, card: str, amount: float) -> dict[str, Any]:
            if order_id % 9 == 0:
                raise ValueError("could not convert string to float: '12,50'")
            return {"receipt": f"R-{order_id}", "amount": amount}

        @queue.task(name="import_prices", queue="imports", retry=LATER)
        def import_prices(supplier: str) -> None:
            raise TimeoutError(f"{supplier} has not answered within 30 s")

        @queue.task(name="resize_images", queue="images")
        def resize_images(ctx: JobContext, product_id: int, sizes: list[int]) -> None:
            ctx.progress(product_id % 7, 8, "thumbnails")
            gate.wait()

        @queue.task(name="sync_customer", queue="imports", limit=Limit(1, by="customer"))
        def sync_customer(customer: str) -> None:
            gate.wait()

        @queue.schedule("0 4 * * *", timezone="Europe/Berlin", name="nightly-report")
        @queue.schedule(every=timedelta(minutes=15), name="stock")
        @queue.task(name="build_report", queue="reports")
        def build_report(month: str = "2026-11") -> str:
            return f"report of {month}"

        @queue.task(name="announce", queue="mail")
        def announce(batch_id: int) -> None: ...

        @queue.task(name="echo", max_attempts=1, retry=Retry.never())
        def echo(text: str, fails: bool = False) -> str:
            if fails:
                raise RuntimeError(text)
            return text

        self.send_receipt, self.charge_card, self.import_prices = (
            send_receipt,
            charge_card,
            import_prices,
        )
        self.resize_images, self.sync_customer = resize_images, sync_customer
        self.build_report, self.echo, self.announce = build_report, echo, announce


@contextmanager
def filled_shop(engine: Engine, *, hostile: bool = True) -> Iterator[PgQueue]:
    """The shop after a day, in the middle of an outage, with jobs that run until the end."""
    chance = random.Random(7)
    before, shop = Shop(engine, BEFORE), Shop(engine, AFTER)
    with before.queue.session() as session, session.begin():
        for order in range(1, 31):
            before.send_receipt.enqueue(session, order, f"customer{order}@shop.example")
            before.charge_card.options(tags=["vip"] if order % 5 == 0 else []).enqueue(
                session, order, "4111 1111 1111 1111", order * 7.5
            )
    Worker(before.queue).run_until_empty(timeout=60)
    _grow_older(engine)

    queue = shop.queue
    with queue.session() as session, session.begin():
        for order in range(31, LAST_RUN + 1):
            customer = f"customer-{chance.randrange(20)}"
            shop.send_receipt.options(
                tags=["vip", customer] if order % 4 == 0 else [customer]
            ).enqueue(session, order, f"{customer}@shop.example")
        for supplier in ("Nordwind", "Ocean Fruit", "Miller & Sons"):
            shop.import_prices.enqueue(session, supplier)
        with queue.workflow(session, "monthly invoices", on_success=shop.announce) as flow:
            plan = flow.add(shop.build_report.job("2026-09"))
            orders = [(order, "4111 1111 1111 1111", 20.0) for order in range(100, 112)]
            charged = flow.add_many(shop.charge_card, orders, after=plan)
            flow.add(shop.build_report.job("2026-11"), after=charged)
            flow.add(shop.import_prices.job("Lost & Found"), after=charged, when="failed")
        if hostile:
            _enqueue_hostile(session, shop)
        cancelled = shop.build_report.options(delay=timedelta(days=1)).enqueue(session, "2026-10")
        session.flush()
        queue.cancel(session, cancelled.id)
    Worker(queue).run_until_empty(timeout=60)

    with queue.session() as session, session.begin():
        for product in range(5):
            shop.resize_images.enqueue(session, product, [200, 400, 1600])
        for customer in ("Acme", "Acme", "Acme", "Globex"):
            shop.sync_customer.enqueue(session, customer)
        with queue.batch(session, "catalogue of winter"):
            shop.resize_images.enqueue_many(session, [(100 + n, [200]) for n in range(40)])
        shop.send_receipt.enqueue_many(
            session,
            [(LAST_RUN + n, f"customer-{n % 20}@shop.example") for n in range(1, BACKLOG + 1)],
        )
        for hours in range(1, 6):
            shop.build_report.options(delay=timedelta(hours=hours)).enqueue(session)
        queue.pause(session, "newsletter")
        for action, target, jobs in (
            ("pause_queue", {"queue": "newsletter"}, 0),
            ("requeue", {"task": "send_receipt", "status": "failed"}, 412),
        ):
            session.add(
                OperatorAction(
                    actor="ann@shop.example",
                    action=action,
                    target=target,
                    jobs=jobs,
                    reason="the mail server is away",
                    finished_at=sa.func.clock_timestamp(),
                )
            )
        queue.pause_task(session, "build_report")
    worker = Worker(queue, {"images": 4, "imports": 2, "mail": 2, "default": 2})
    thread = Thread(target=worker.run)
    thread.start()
    try:
        running = sa.text("SELECT count(*) FROM pgqueue.leases")
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            wait_until(lambda: connection.scalar(running) >= 6)
        _write_history(engine, chance)
        yield queue
    finally:
        shop.gate.set()
        worker.stop()
        thread.join(60)


def _enqueue_hostile(session: Session, shop: Shop) -> None:
    """Jobs with texts that are meant for a browser or a terminal."""
    jobs: list[Job] = []
    for text in HOSTILE:
        echo = shop.echo.options(meta={"note": text[:2000]})
        jobs += echo.enqueue(session, text), echo.enqueue(session, text, fails=True)
    jobs.append(shop.echo.enqueue(session, "x" * 900_000))
    session.flush()
    for job in jobs:  # an enqueue refuses such tags; whoever has the table can write them
        job.tags = [*HOSTILE, *(f"tag {n}" for n in range(500))]


def _grow_older(engine: Engine) -> None:
    """Move what has happened so far back by a day."""
    columns = {
        "jobs": ("created_at", "run_at", "started_at", "finished_at"),
        "job_attempts": ("started_at", "finished_at"),
        "dead_letters": ("finished_at",),
        "error_groups": ("first_at", "last_at"),
        "deploys": ("first_at",),
    }
    with engine.begin() as connection:
        for table, names in columns.items():
            changes = ", ".join(f"{name} = {name} - interval '1 day'" for name in names)
            connection.execute(sa.text(f"UPDATE pgqueue.{table} SET {changes}"))


def _write_history(engine: Engine, chance: random.Random) -> None:
    """The statistics of a day: twenty minutes ago, receipts have begun to fail, and to wait."""
    tasks = (("send_receipt", 90, 9), ("charge_card", 40, 7), ("resize_images", 9, 12))
    queues = (("mail", 1.0), ("images", 0.02), ("default", 0.01))
    with engine.begin() as connection:
        now: datetime = connection.scalar(sa.text("SELECT date_trunc('minute', now())"))
        task_minutes, queue_minutes = [], []
        for ago in range(24 * 60, 0, -1):
            at = now - timedelta(minutes=ago)
            rush = 1.5 if 8 <= at.hour < 20 else 1.0
            for task, mean, bucket in tasks:
                ended = int(chance.gauss(mean * rush, mean / 9))
                share = 0.6 if task == "send_receipt" and ago <= 20 else chance.random() * 0.01
                failed = int(ended * share)
                task_minutes.append(_minute(at, task, ended - failed, failed, bucket, chance))
            waiting = 40 + chance.randrange(9) + max(0, 20 - ago) / 20 * BACKLOG
            for queue, share in queues:
                started = int((130 if ago > 20 else 50) * rush * share)
                queue_minutes.append(_depth(at, queue, int(waiting * share), started))
        metadata = sa.MetaData(schema="pgqueue")
        for name, rows in (("task_minutes", task_minutes), ("queue_minutes", queue_minutes)):
            table = sa.Table(name, metadata, autoload_with=connection)
            connection.execute(table.delete())
            connection.execute(table.insert(), rows)
        connection.execute(
            sa.text("UPDATE pgqueue.deploys SET first_at = :at WHERE version = :version"),
            {"at": now - timedelta(minutes=20, seconds=40), "version": AFTER},
        )


def _minute(
    at: datetime, task: str, done: int, failed: int, bucket: int, chance: random.Random
) -> dict[str, Any]:
    ran, waited = [0] * MOST_BUCKETS, [0] * MOST_BUCKETS
    for _ in range(12):
        ran[max(1, int(chance.gauss(bucket, 1.2)))] += max(1, done // 12)
    waited[6], waited[8] = done, failed + 2
    return {
        "at": at, "task": task, "succeeded": done, "failed": failed,
        "retried": failed // 2 + chance.randrange(3), "cancelled": 0, "other": 0,
        "ran": ran, "waited": waited,
    }  # fmt: skip


def _depth(at: datetime, queue: str, waiting: int, started: int) -> dict[str, Any]:
    return {
        "at": at, "queue": queue, "counted_at": at + timedelta(seconds=55), "waiting": waiting,
        "due": waiting, "blocked": 0, "running": 4, "oldest_due_s": waiting // 4 or None,
        "started": started,
    }  # fmt: skip
