"""Tests of the shop; each is one transaction, which is rolled back.  Run them with `pytest`."""

import pytest
from shop import Base, create_app, db, queue, write_receipt

from pgqueue.testing import assert_enqueued, enqueued, run_jobs


@pytest.fixture(scope="session")
def pgqueue_create_tables():
    return Base.metadata.create_all


@pytest.fixture
def app(pgqueue_engine, monkeypatch):
    url = pgqueue_engine.url.render_as_string(hide_password=False)
    monkeypatch.setenv("DATABASE_URL", url)
    app = create_app()
    with app.app_context():
        engines = db.engines
        db.session.configure(join_transaction_mode="create_savepoint")
    with pgqueue_engine.connect() as connection:
        transaction = connection.begin()
        engines[None] = connection
        yield app
        transaction.rollback()


def test_an_order_gets_its_receipt(app):
    client = app.test_client()
    placed = client.post("/orders", json={"item": "a book", "cents": 1250}).json

    with app.app_context():
        assert_enqueued(db.session, write_receipt, order_id=placed["id"])
        run_jobs(db.session, queue=queue)
        db.session.commit()

    shown = client.get(f"/orders/{placed['id']}").json
    assert shown == {"item": "a book", "receipt": "a book: 12.50"}


def test_a_refused_order_leaves_no_job(app):
    refused = app.test_client().post("/orders", json={"item": "a yacht", "cents": 99_900_000})

    assert refused.status_code == 409
    with app.app_context():
        assert enqueued(db.session) == []
