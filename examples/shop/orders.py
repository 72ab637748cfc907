"""What follows an order: a workflow of payment, receipt, shipment, mail and webhook.

The payment gateway has two versions.  With ``v2`` each payment fails, until an operator runs
:func:`use_gateway` with ``v1``: the incident of README.md.
"""

import json
import os
import random
import time
from datetime import timedelta
from typing import Literal
from urllib.request import Request, urlopen

from fpdf import FPDF
from shop import Order, Receipt, db, queue, write_receipt
from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from pgqueue import JobContext, Limit, Retry


class Reservation(db.Model):
    """What is kept in the store for an order, until it is shipped."""

    __tablename__ = "reservations"
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id), primary_key=True)


class PrintedReceipt(db.Model):
    """The receipt of an order, as a PDF."""

    __tablename__ = "printed_receipts"
    order_id: Mapped[int] = mapped_column(ForeignKey(Receipt.order_id), primary_key=True)
    pdf: Mapped[bytes]


class Setting(db.Model):
    """What operators may change while the shop runs."""

    __tablename__ = "settings"
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class GatewayError(Exception):
    """The payment gateway has refused, or did not answer."""


def place_order(customer):
    """Add an order, and the jobs that follow it, to the transaction of ``db.session``."""
    order = Order(item="a book", cents=random.randint(500, 9000))
    db.session.add(order)
    db.session.flush()
    account, address = f"acc-{customer % 7}", f"{customer}@example.org"
    tags = [f"customer-{customer}"]
    with queue.workflow(db.session, f"order {order.id}") as flow:
        reserved = flow.add(reserve.job(order.id))
        payment = capture.options(tags=tags).job(order.id, account, order.cents)
        paid = flow.add(payment, after=reserved)
        written = flow.add(write_receipt.job(order.id), after=paid)
        flow.add(print_receipt.job(order.id), after=written)
        flow.add(ship.job(order.id), after=paid)
        flow.add(send_mail.options(tags=tags).job(address, "Your order"), after=paid)
        flow.add(call_webhook.job(order.id), after=paid)
        flow.add(release.job(order.id), after=paid, when="failed")
    return order


@queue.task(name="store.reserve", transactional=True)
def reserve(order_id: int) -> None:
    db.session.add(Reservation(order_id=order_id))


@queue.task(name="store.ship", transactional=True)
def ship(order_id: int) -> None:
    """End the reservation; a payment that succeeds after a requeue has none any more."""
    db.session.query(Reservation).filter_by(order_id=order_id).delete()


@queue.task(name="store.release", transactional=True)
def release(order_id: int) -> None:
    """Undo :func:`reserve`, which may have failed itself."""
    db.session.query(Reservation).filter_by(order_id=order_id).delete()


@queue.task(
    name="payments.capture",
    queue="payments",
    max_attempts=3,
    retry=Retry.constant(timedelta(seconds=2)),
    limit=Limit(20, by="account"),
)
def capture(order_id: int, account: str, cents: int) -> dict[str, str]:
    gateway = db.session.get(Setting, "gateway")
    answer = {"id": f"pay_{order_id}", "currency": "EUR"}
    if gateway is not None and gateway.value == "v2":
        del answer["currency"]
    db.session.commit()  # hold no transaction while the gateway works
    time.sleep(random.uniform(0.01, 0.2))
    if random.random() < 0.02:
        raise GatewayError(f"HTTP 503 for order {order_id}")
    return {"payment": answer["id"], "currency": answer["currency"]}


@queue.task(name="payments.use_gateway", queue="payments", transactional=True)
def use_gateway(version: Literal["v1", "v2"]) -> None:
    db.session.merge(Setting(name="gateway", value=version))


@queue.task(name="receipts.print", transactional=True)
def print_receipt(order_id: int) -> None:
    receipt = db.session.get_one(Receipt, order_id)
    pdf = FPDF(format=(105, 148))
    pdf.add_page()
    pdf.set_font("Helvetica", size=14)
    pdf.multi_cell(0, 8, f"Receipt {order_id}\n\n{receipt.text} EUR")
    db.session.merge(PrintedReceipt(order_id=order_id, pdf=bytes(pdf.output())))


@queue.task(name="mails.send", queue="mail", limit=Limit(50, per=timedelta(seconds=1), burst=50))
def send_mail(to: str, subject: str) -> None:
    time.sleep(random.uniform(0.005, 0.05))


@queue.task(
    name="webhooks.call",
    queue="webhooks",
    max_attempts=5,
    retry=Retry.exponential(base=timedelta(seconds=1)),
    limit=Limit(10, per=timedelta(seconds=1), burst=2),  # what the partner allows
    timeout=timedelta(seconds=10),
)
def call_webhook(ctx: JobContext, order_id: int) -> int:
    """Tell the partner of an order; after a crash it may hear of it twice, with the same key."""
    body = json.dumps({"order": order_id}).encode()
    headers = {"Content-Type": "application/json", "Idempotency-Key": str(ctx.job_id)}
    call = Request(os.environ["PARTNER_URL"], data=body, headers=headers)
    with urlopen(call, timeout=5) as answer:
        return answer.status
