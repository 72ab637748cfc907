"""Tests of the pages: the login, a newsletter with its progress, and pictures."""

import io
from datetime import date, timedelta

import pytest
from operations import drawn_picture
from PIL import Image
from service import DayReport, close_day
from shop import db

from pgqueue import Job
from pgqueue.testing import run_jobs


@pytest.fixture
def operator(client):
    client.post("/login", data={"name": "ann", "password": "of the tests"})
    return client


def run(app, **options):
    with app.app_context():
        run_jobs(db.session, **options)
        db.session.commit()


def test_only_operators_see_the_dashboard(client):
    assert client.get("/ops/").location == "/login"
    refused = client.post("/login", data={"name": "ann", "password": "open sesame"})
    assert "This is not the password." in refused.text

    client.post("/login", data={"name": "ann", "password": "of the tests"})

    assert "<h1>You are ann</h1>" in client.get("/ops/you").text


def test_a_newsletter_shows_its_progress(app, operator):
    page = operator.post("/newsletters", data={"subject": "A sale"}).location
    assert "0 of 300 mails" in operator.get(page).text

    run(app, until=timedelta(minutes=1))

    assert "All are sent." in operator.get(page).text


def test_a_picture_gets_a_thumbnail(app, client):
    client.post("/pictures", data={"picture": (io.BytesIO(drawn_picture()), "drawn.png")})

    run(app)

    [address] = [part for part in client.get("/").text.split('"') if part.endswith(".png")]
    assert max(Image.open(io.BytesIO(client.get(address).data)).size) == 64


def test_a_file_that_is_no_picture_fails_once(app, client):
    client.post("/pictures", data={"picture": (io.BytesIO(b"a letter"), "letter.png")})

    run(app, raise_errors=False)

    with app.app_context():
        job = db.session.query(Job).one()
        assert (job.outcome, job.attempts) == ("failed", 1)
        assert "cannot identify image file" in job.last_error


def test_the_nightly_report_counts_the_orders(app, client):
    client.post("/orders", json={"item": "a book", "cents": 1250})

    with app.app_context():
        close_day()
        db.session.commit()
        report = db.session.query(DayReport).one()
        assert (report.day, report.orders, report.cents) == (date.today(), 1, 1250)
