"""The fixtures of the tests: each test is one transaction, which is rolled back."""

import os

import pytest
from operations import create_app
from shop import Base, queue


@pytest.fixture(scope="session")
def pgqueue_create_tables():
    return Base.metadata.create_all


@pytest.fixture(scope="session")
def app(pgqueue_engine):
    os.environ["DATABASE_URL"] = pgqueue_engine.url.render_as_string(hide_password=False)
    os.environ["SECRET_KEY"] = os.environ["OPERATOR_PASSWORD"] = "of the tests"
    return create_app()


@pytest.fixture(scope="session")
def pgqueue_queue(app):
    return queue


@pytest.fixture
def client(app, pgqueue_session):
    return app.test_client()
