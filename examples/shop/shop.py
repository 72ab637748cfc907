"""A shop: an order and the job that writes its receipt are one commit."""

import os

from flask import Blueprint, Flask, abort, request
from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from pgqueue.flask import PgQueue


class Base(DeclarativeBase): ...


db = SQLAlchemy(model_class=Base)
migrate = Migrate()
queue = PgQueue()
shop = Blueprint("shop", __name__)


def create_app():
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["DATABASE_URL"]
    db.init_app(app)
    migrate.init_app(app, db)
    queue.init_app(app, db)
    app.register_blueprint(shop)
    return app


class Order(db.Model):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    cents: Mapped[int]
    receipt: Mapped["Receipt | None"] = relationship(back_populates="order")


class Receipt(db.Model):
    __tablename__ = "receipts"
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id), primary_key=True)
    text: Mapped[str]
    order: Mapped[Order] = relationship(back_populates="receipt")


@queue.task(transactional=True)
def write_receipt(order_id: int) -> None:
    order = db.session.get_one(Order, order_id)
    db.session.add(Receipt(order=order, text=f"{order.item}: {order.cents / 100:.2f}"))


@shop.post("/orders")
def place_order():
    order = Order(item=request.json["item"], cents=request.json["cents"])
    db.session.add(order)
    db.session.flush()  # the database gives the order its id
    write_receipt.enqueue(db.session, order.id)
    if order.cents > 100_000:
        abort(409)  # nothing is committed: neither the order nor its job
    db.session.commit()
    return {"id": order.id}, 201


@shop.get("/orders/<int:order_id>")
def show_order(order_id):
    order = db.get_or_404(Order, order_id)
    return {"item": order.item, "receipt": order.receipt.text if order.receipt else None}
