"""The application of the smoke: one queue for the command line, one for Flask."""

import os
from types import SimpleNamespace

from flask import Flask
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import pgqueue.flask
from pgqueue import PgQueue

SOLD = text("INSERT INTO sold (item) VALUES (:item)")

queue = PgQueue(os.environ["SMOKE_URL"])
flask_queue = pgqueue.flask.PgQueue()


@queue.task
def sell(session: Session, item: str) -> None:
    session.execute(SOLD, {"item": item})


@queue.task
async def sell_async(session: AsyncSession, item: str) -> None:
    await session.execute(SOLD, {"item": item})


@flask_queue.task
def sell_in_flask(session: Session, item: str) -> None:
    session.execute(SOLD, {"item": item})


def create_app() -> Flask:
    app = Flask("smoke")
    engine = create_engine(os.environ["SMOKE_URL"])
    db = SimpleNamespace(engine=engine, session=scoped_session(sessionmaker(engine)))
    flask_queue.init_app(app, db)
    return app
