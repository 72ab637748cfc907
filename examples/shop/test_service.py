"""Tests of the reports: tenants, progress, failures and the names of the previous release."""

import pytest
from service import sum_orders
from shop import db

from pgqueue import Job
from pgqueue.testing import run_jobs

ACME = {"X-Tenant": "acme"}


@pytest.fixture
def run(app):
    """Run the waiting jobs, and raise no errors of handlers."""

    def run():
        with app.app_context():
            run_jobs(db.session, raise_errors=False)
            db.session.commit()

    return run


def test_a_report_shows_its_progress_to_the_tenant_that_has_ordered_it(client, run):
    for cents in (500, 1250, 2000):
        client.post("/orders", json={"item": "a book", "cents": cents})
    report = client.post("/reports", json={"at_least": 1000}, headers=ACME).json
    waiting = client.get(f"/reports/{report['id']}", headers=ACME).json
    assert waiting == {"status": "pending", "progress": None, "result": None}

    run()

    assert client.get(f"/reports/{report['id']}", headers=ACME).json == {
        "status": "succeeded",
        "progress": {"done": 2, "total": 2, "note": None},
        "result": {"orders": 2, "cents": 3250},
    }
    assert client.get(f"/reports/{report['id']}").status_code == 404


def test_a_report_that_fails_tells_the_support(client, run, caplog):
    report = client.post("/reports", json={"at_least": 1000}, headers=ACME).json

    run()

    assert client.get(f"/reports/{report['id']}", headers=ACME).json["status"] == "failed"
    assert f"report {report['id']} of acme: no order of 1000 or more" in caplog.text


def test_a_job_of_the_last_release_still_runs(app, client, run):
    client.post("/orders", json={"item": "a book", "cents": 1250})
    with app.app_context():
        old = sum_orders.job()
        old.task, old.args = "reports.total", {"minimum": 1000}
        db.session.add(old)
        db.session.commit()
        job_id = old.id

    run()

    with app.app_context():
        job = db.session.get(Job, job_id)
        assert job.result == {"orders": 1, "cents": 1250}
