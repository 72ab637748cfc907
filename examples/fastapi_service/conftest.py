"""The fixtures of the tests: each test is one transaction, which is rolled back."""

import os

# The tests have a database of their own: they never reach that of the service.
os.environ["DATABASE_URL"] = "postgresql+psycopg:///of_no_test"
os.environ["SECRET_KEY"] = os.environ["OPERATOR_PASSWORD"] = "of the tests"

import httpx
import pytest
from shop import Base, app, queue, session_of_request
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine


@pytest.fixture(scope="session")
def pgqueue_queue():
    return queue


@pytest.fixture(scope="session")
def pgqueue_create_tables():
    return Base.metadata.create_all


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
async def session(pgqueue_engine, pgqueue_queue, anyio_backend):
    engine = create_async_engine(pgqueue_engine.url)
    async with engine.connect() as connection:
        transaction = await connection.begin()
        with queue.bound_to(connection):
            async with AsyncSession(
                connection, expire_on_commit=False, join_transaction_mode="create_savepoint"
            ) as session:
                yield session
        await transaction.rollback()
    await engine.dispose()


@pytest.fixture
async def client(session):
    app.dependency_overrides[session_of_request] = lambda: session
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        yield client
    app.dependency_overrides.clear()
