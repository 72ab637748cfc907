"""The shop as its operators see it: the dashboard behind a password, and traffic to look at.

``shop.py`` has the orders, ``service.py`` the reports; this adds payments, mails, a catalogue and
price lists.  With ``GATEWAY=v2`` each payment fails, as after a release with a fault.
"""

import hmac
import os
import random
import time
from datetime import timedelta

import click
from service import create_app as create_service
from shop import Order, db, queue
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


class GatewayError(Exception):
    """The payment gateway has refused, or did not answer."""


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
    """Place orders as customers do, each with its payment, its receipt and its mail."""
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


def place_order(customer):
    order = Order(item="a book", cents=random.randint(500, 9000))
    db.session.add(order)
    db.session.flush()
    tags = [f"customer-{customer}"]
    capture.options(tags=tags).enqueue(db.session, order.id, f"acc-{customer % 7}", order.cents)
    send_mail.options(tags=tags).enqueue(db.session, f"{customer}@example.org", "Your order")
