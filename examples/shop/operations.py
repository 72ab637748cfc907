"""The whole shop: its pages, a login for operators, the dashboard, and traffic to look at.

``shop.py`` has the orders and ``service.py`` the reports; ``orders.py``, ``pictures.py`` and
``newsletters.py`` have the jobs that a shop usually has.
"""

import hmac
import io
import os
import random
import time

import click
from flask import Blueprint, Response, abort, flash, redirect, render_template, request, url_for
from flask_login import LoginManager, UserMixin, current_user, login_user
from newsletters import newsletters, send_newsletter
from orders import PrintedReceipt, place_order, use_gateway
from pictures import Picture, add_picture, pictures
from PIL import Image
from service import DayReport
from service import create_app as create_service
from shop import Order, db, queue

from pgqueue.dashboard import RIGHTS, Access

queue.version = os.environ.get("RELEASE", "")
login = LoginManager()
login.login_view = "site.log_in"
site = Blueprint("site", __name__)


def create_app():
    app = create_service()
    app.secret_key = os.environ["SECRET_KEY"]
    app.config["SESSION_COOKIE_SAMESITE"] = "Lax"
    login.init_app(app)
    for blueprint in (site, pictures, newsletters):
        app.register_blueprint(blueprint)
    dashboard = queue.dashboard(authorize=operator, environment="example")
    app.register_blueprint(dashboard.blueprint(url_prefix="/ops"))
    app.cli.add_command(traffic)
    return app


class Operator(UserMixin):
    """Who knows the password of the shop; an application has a table of its users."""

    def __init__(self, name):
        self.id = name


@login.user_loader
def load_operator(name):
    return Operator(name)


def operator(request):
    """Let operators into the dashboard, and others to the login."""
    if not current_user.is_authenticated:
        return redirect(url_for("site.log_in"))
    return Access(user=current_user.id, rights=RIGHTS)


@site.route("/login", methods=["GET", "POST"])
def log_in():
    if request.method == "POST":
        if hmac.compare_digest(request.form["password"], os.environ["OPERATOR_PASSWORD"]):
            login_user(Operator(request.form["name"] or "operator"))
            return redirect("/ops/")
        flash("This is not the password.")
    return render_template("login.html")


@site.get("/")
def index():
    orders = db.session.query(Order).order_by(Order.id.desc()).limit(10).all()
    ids = [order.id for order in orders]
    printed = db.session.query(PrintedReceipt.order_id).filter(PrintedReceipt.order_id.in_(ids))
    return render_template(
        "index.html",
        orders=orders,
        printed={row.order_id for row in printed},
        pictures=db.session.query(Picture).order_by(Picture.id.desc()).limit(8).all(),
        report=db.session.query(DayReport).order_by(DayReport.day.desc()).first(),
    )


@site.post("/buy")
def buy():
    place_order(random.randint(1, 500))
    db.session.commit()
    return redirect(url_for("site.index"))


@site.get("/receipts/<int:order_id>.pdf")
def receipt(order_id):
    return Response(db.get_or_404(PrintedReceipt, order_id).pdf, mimetype="application/pdf")


@site.post("/partner")
def partner():
    """The webhook of a partner, who often does not answer."""
    if random.random() < 0.3:
        abort(503)
    return {"order": request.json["order"]}


@click.command()
@click.option("--seconds", default=60, show_default=True)
@click.option("--per-second", default=5, show_default=True)
@click.option(
    "--incident-after", default=45, show_default=True, help="When payments begin to fail."
)
def traffic(seconds, per_second, incident_after):
    """Do what customers do, and cause an incident."""
    for second in range(seconds):
        began = time.monotonic()
        for _ in range(per_second):
            place_order(random.randint(1, 500))
        if second % 5 == 0:
            add_picture(drawn_picture() if second % 4 else b"this is no picture")
        if second % 120 == 0:
            send_newsletter(f"News {second // 120 + 1}")
        if second == incident_after:
            use_gateway.enqueue(db.session, "v2")
        db.session.commit()
        time.sleep(max(0.0, began + 1 - time.monotonic()))


def drawn_picture():
    colours = [Image.linear_gradient("L").rotate(random.randint(0, 359)) for _ in "RGB"]
    drawn = io.BytesIO()
    Image.merge("RGB", colours).save(drawn, "PNG")
    return drawn.getvalue()
