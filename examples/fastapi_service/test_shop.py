"""Tests of the orders, receipts and reports."""

import pytest
from shop import queue, write_receipt

from pgqueue.testing import assert_enqueued, enqueued, run_jobs

pytestmark = pytest.mark.anyio


async def test_an_order_gets_its_receipt(client, session):
    placed = (await client.post("/orders", json={"item": "a book", "cents": 1250})).json()

    await session.run_sync(assert_enqueued, write_receipt, order_id=placed["id"])
    await session.run_sync(run_jobs, queue=queue)

    shown = (await client.get(f"/orders/{placed['id']}")).json()
    assert shown == {"item": "a book", "receipt": "a book: 12.50"}


async def test_a_refused_order_leaves_no_job(client, session):
    refused = await client.post("/orders", json={"item": "a yacht", "cents": 99_900_000})
    await session.rollback()  # as the end of the request does

    assert refused.status_code == 409
    assert await session.run_sync(enqueued) == []


async def test_a_report_is_read_by_its_token(client, session):
    await client.post("/orders", json={"item": "a book", "cents": 1250})
    token = (await client.post("/reports?at_least=1000")).json()["token"]

    await session.run_sync(run_jobs, queue=queue)

    shown = (await client.get(f"/reports/{token}")).json()
    assert shown == {"status": "succeeded", "result": {"orders": 1, "cents": 1250}}
    assert (await client.get(f"/reports/x{token}")).status_code == 404
