"""The fixtures of the tests: each test is one transaction, which is rolled back."""

import pytest
from service import create_app
from shop import Base, db


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


@pytest.fixture
def client(app):
    return app.test_client()
