"""Tests of what follows an order: payment, receipt and shipment, or their compensation."""

import random
from datetime import timedelta

import pytest
from operations import Reservation, capture, place_order
from shop import Receipt, db, queue

from pgqueue import Job
from pgqueue.testing import run_jobs


@pytest.fixture
def run(app):
    """Run the jobs that are due, and their retries; returns the outcome of the last workflow."""

    def run():
        random.seed(1)  # the gateway fails at random, too
        run_jobs(db.session, raise_errors=False, until=timedelta(minutes=1))
        [workflow] = queue.batches(db.session, 1)
        return workflow.outcome

    with app.app_context():
        yield run


def test_a_paid_order_is_shipped_and_has_a_receipt(run):
    order = place_order(customer=7)

    assert run() == "succeeded"

    assert db.session.get(Receipt, order.id) is not None
    assert db.session.get(Reservation, order.id) is None


def test_an_order_that_cannot_be_paid_releases_what_was_reserved(run, monkeypatch):
    monkeypatch.setenv("GATEWAY", "v2")
    order = place_order(customer=7)

    assert run() == "failed"

    assert db.session.get(Receipt, order.id) is None
    assert db.session.get(Reservation, order.id) is None


def test_a_requeued_payment_brings_back_what_follows_it(run, monkeypatch):
    monkeypatch.setenv("GATEWAY", "v2")
    order = place_order(customer=7)
    run()
    payment = db.session.query(Job).filter_by(task=capture.name, outcome="failed").one()
    monkeypatch.delenv("GATEWAY")

    queue.requeue(db.session, payment.id)

    assert run() == "succeeded"
    assert db.session.get(Receipt, order.id) is not None
