"""Tests of the orders and receipts.  Run them with `pytest`."""

from shop import db, write_receipt

from pgqueue.testing import assert_enqueued, enqueued, run_jobs


def test_an_order_gets_its_receipt(app, client):
    placed = client.post("/orders", json={"item": "a book", "cents": 1250}).json

    with app.app_context():
        assert_enqueued(db.session, write_receipt, order_id=placed["id"])
        run_jobs(db.session)
        db.session.commit()

    shown = client.get(f"/orders/{placed['id']}").json
    assert shown == {"item": "a book", "receipt": "a book: 12.50"}


def test_a_refused_order_leaves_no_job(app, client):
    refused = client.post("/orders", json={"item": "a yacht", "cents": 99_900_000})

    assert refused.status_code == 409
    with app.app_context():
        assert enqueued(db.session) == []
