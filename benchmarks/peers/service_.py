"""A Flask service that saves a row in each request, and hands a job to a queue."""

from flask import Flask
from flask_sqlalchemy import SQLAlchemy

db = SQLAlchemy()


class Order(db.Model):
    __tablename__ = "orders"

    id = db.Column(db.BigInteger, primary_key=True)
    number = db.Column(db.BigInteger, nullable=False)


def new_service(place_order, url):
    """``place_order``: what a request does; called with the order that is in ``db.session``."""
    app = Flask("service")
    app.config["SQLALCHEMY_DATABASE_URI"] = url.replace("postgresql://", "postgresql+psycopg://")
    db.init_app(app)

    @app.post("/orders/<int:number>")
    def order(number):
        new = Order(number=number)
        db.session.add(new)
        place_order(new)
        return {"id": new.id}, 201

    return app


class Requests:
    """Part of an adapter: its enqueue is a request."""

    def serve(self, app):
        with app.app_context():
            db.create_all()
        self.client = app.test_client()

    def enqueue(self, number):
        assert self.client.post(f"/orders/{number}").status_code == 201
