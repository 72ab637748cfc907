"""The shop as its operators see it: the dashboard behind a password, and traffic to look at.

``shop.py`` has the orders, ``service.py`` the reports; this adds what follows an order as a
workflow, a catalogue and price lists.  With ``GATEWAY=v2`` each payment fails, as after a release
with a fault.
"""

import hmac
import os
import random
import time
from datetime import timedelta

import click
from service import create_app as create_service
from shop import Order, db, queue, write_receipt
from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column
from werkzeug import Response

from pgqueue import JobContext, Limit, Retry
from pgqueue.dashboard import RIGHTS, Access

queue.version = os.environ.get("RELEASE", "")


def create_app():
    app = create_service()
    app.secret_key = os.environ["SECRET_KEY"]
    dashboard = queue.dashboard(authorize=operator, environment="example")
    app.register_blueprint(dashboard.blueprint(url_prefix="/ops"))
    app.cli.add_command(traffic)
    return app


def operator(request):
    """Let in who knows the password of the shop; an application has a login of its own."""
    given, password = request.authorization, os.environ["OPERATOR_PASSWORD"]
    if given is not None and hmac.compare_digest(given.password or "", password):
        return Access(user=given.username or "operator", rights=RIGHTS)
    return Response("A password, please.", 401, {"WWW-Authenticate": 'Basic realm="shop"'})


class Reservation(db.Model):
    """What is kept in the store for an order, until it is shipped."""

    __tablename__ = "reservations"
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id), primary_key=True)


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
        flow.add(write_receipt.job(order.id), after=paid)
        flow.add(ship.job(order.id), after=paid)
        flow.add(send_mail.options(tags=tags).job(address, "Your order"), after=paid)
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
    time.sleep(random.uniform(0.01, 0.2))
    answer = {"id": f"pay_{order_id}", "currency": "EUR"}
    if os.environ.get("GATEWAY") == "v2":
        del answer["currency"]
    if random.random() < 0.02:
        raise GatewayError(f"HTTP 503 for order {order_id}")
    return {"payment": answer["id"], "currency": answer["currency"]}


@queue.task(name="mails.send", queue="mail", limit=Limit(50, per=timedelta(seconds=1), burst=50))
def send_mail(to: str, subject: str) -> None:
    time.sleep(random.uniform(0.005, 0.05))


@queue.schedule(every=timedelta(minutes=1), overlap="skip")
@queue.task(name="catalogue.rebuild", queue="nightly")
def rebuild_catalogue(ctx: JobContext) -> int:
    for done in range(1, 101):
        time.sleep(0.1)
        ctx.progress(done, 100, note="writing pages")
    return 100


@queue.task(name="prices.import_file", queue="imports")
def import_prices(file: str) -> int:
    time.sleep(random.uniform(0.05, 0.5))
    if file.endswith("7.csv"):
        raise ValueError(f"{file}: line 12 has no price")
    return 1000


@click.command()
@click.option("--seconds", default=60, show_default=True)
@click.option("--per-second", default=20, show_default=True)
def traffic(seconds, per_second):
    """Place orders as customers do."""
    for second in range(seconds):
        began = time.monotonic()
        for _ in range(per_second):
            place_order(random.randint(1, 500))
        if second % 20 == 0:
            with queue.batch(db.session, name=f"price lists {second // 20}"):
                for number in range(10):
                    import_prices.enqueue(db.session, f"list-{number}.csv")
        db.session.commit()
        time.sleep(max(0.0, began + 1 - time.monotonic()))
