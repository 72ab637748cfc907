"""Tests of what follows an order: payment, receipt and shipment, or their compensation."""

import random
from datetime import timedelta
from threading import Thread
from urllib.error import HTTPError

import pytest
from orders import PrintedReceipt, Reservation, call_webhook, capture, place_order, use_gateway
from shop import Receipt, db, queue
from werkzeug import Request, Response
from werkzeug.serving import make_server

from pgqueue import Job
from pgqueue.testing import assert_enqueued, run_jobs


@pytest.fixture
def partner(monkeypatch):
    """The webhook of the partner; its calls (key, order), and the statuses of its next answers."""

    @Request.application
    def answer(request):
        # A body that is not read blocks the server until the caller closes its connection.
        partner.calls.append((request.headers["Idempotency-Key"], request.get_json()["order"]))
        return Response(status=partner.statuses.pop() if partner.statuses else 200)

    partner = make_server("127.0.0.1", 0, answer)
    partner.calls, partner.statuses = [], []
    monkeypatch.setenv("PARTNER_URL", f"http://127.0.0.1:{partner.port}/")
    thread = Thread(target=partner.serve_forever)
    thread.start()
    yield partner
    partner.shutdown()
    thread.join()


@pytest.fixture
def run(app, partner, pgqueue_session):
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
    assert db.session.get(PrintedReceipt, order.id).pdf.startswith(b"%PDF")
    assert db.session.get(Reservation, order.id) is None


def test_an_order_that_cannot_be_paid_releases_what_was_reserved(run):
    use_gateway("v2")
    db.session.commit()
    order = place_order(customer=7)

    assert run() == "failed"

    assert db.session.get(Receipt, order.id) is None
    assert db.session.get(Reservation, order.id) is None


def test_a_requeued_payment_brings_back_what_follows_it(run):
    use_gateway("v2")
    db.session.commit()
    order = place_order(customer=7)
    run()
    payment = db.session.query(Job).filter_by(task=capture.name, outcome="failed").one()
    use_gateway("v1")
    db.session.commit()

    queue.requeue(db.session, payment.id)

    assert run() == "succeeded"
    assert db.session.get(Receipt, order.id) is not None


def test_a_webhook_is_called_again_with_the_same_key(app, partner, pgqueue_session):
    partner.statuses = [503]
    with app.app_context():
        job = call_webhook.enqueue(db.session, 7)

        with pytest.raises(HTTPError, match="503"):
            run_jobs(db.session)
        assert_enqueued(db.session, call_webhook, order_id=7)
        run_jobs(db.session, until=timedelta(minutes=1))

        assert job.result == 200
        assert partner.calls == [(str(job.id), 7)] * 2
