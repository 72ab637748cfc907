"""The shop as it runs in production: tenants, reports with progress, a nightly report, logs.

``shop.py`` has the orders and receipts.  README.md links each part to its page of the manual.
"""

import logging
from datetime import date, timedelta

from flask import Blueprint, abort, current_app, g, request
from shop import Order, db, queue
from shop import create_app as create_shop
from sqlalchemy import func
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue import Discard, Job, JobContext

reports = Blueprint("reports", __name__)


def create_app():
    app = create_shop()
    app.logger.setLevel(logging.INFO)
    app.before_request(take_tenant)
    app.register_blueprint(reports)
    return app


def take_tenant():
    g.tenant = request.headers.get("X-Tenant", "main")


@queue.on_enqueue
def note_tenant(task):
    """Store the tenant of the current request or job in the meta of each new job."""
    return {"tenant": g.tenant} if "tenant" in g else None


@queue.middleware
def enter_tenant(ctx: JobContext):
    g.tenant = ctx.meta.get("tenant", "main")  # each job has an application context of its own
    yield


@queue.on_attempt_end
def log_attempt(event):
    words = "%s: attempt %d has %s after %s"
    logging.getLogger("shop").info(words, event.task, event.attempt, event.outcome, event.ran)


@queue.task(name="reports.tell_support", transactional=True)
def tell_support(job_id: int) -> None:
    failed = db.session.get_one(Job, job_id)
    current_app.logger.error("report %d of %s: %s", job_id, g.tenant, failed.last_error)


@queue.task(
    name="reports.sum_orders",
    aliases=["reports.total"],  # its name in the previous release, whose jobs may still wait
    renamed={"minimum": "at_least"},
    max_attempts=3,
    on_failed=tell_support,
    keep=timedelta(days=1),  # old reports are not needed
)
def sum_orders(ctx: JobContext, at_least: int = 0) -> dict[str, int]:
    chosen = db.session.query(Order).filter(Order.cents >= at_least).all()
    if not chosen:
        raise Discard(f"no order of {at_least} or more")
    total = 0
    for done, order in enumerate(chosen, start=1):
        total += order.cents
        ctx.progress(done, len(chosen))
    return {"orders": len(chosen), "cents": total}


@reports.post("/reports")
def order_report():
    job = sum_orders.enqueue(db.session, request.json.get("at_least", 0))
    db.session.commit()
    return {"id": job.id}, 202


@reports.get("/reports/<int:job_id>")
def show_report(job_id):
    job = db.get_or_404(Job, job_id)
    if job.task != sum_orders.name or (job.meta or {}).get("tenant") != g.tenant:
        abort(404)  # job ids can be guessed: show each tenant its own reports only
    return {"status": job.status, "progress": job.progress, "result": job.result}


class DayReport(db.Model):
    """What had been ordered by the end of a day."""

    __tablename__ = "day_reports"
    day: Mapped[date] = mapped_column(primary_key=True)
    orders: Mapped[int]
    cents: Mapped[int]


@queue.schedule("0 2 * * *", timezone="Europe/Berlin", catch_up="last")
@queue.task(name="reports.close_day", queue="nightly", transactional=True)
def close_day() -> None:
    orders, cents = db.session.query(func.count(), func.coalesce(func.sum(Order.cents), 0)).one()
    db.session.merge(DayReport(day=date.today(), orders=orders, cents=cents))
