"""PgQueuer in a contest: asyncpg, heartbeat timeout of five seconds."""

import asyncio
import json
import os
import sys
from datetime import timedelta

sys.path.insert(0, os.path.dirname(__file__))
import asyncpg
from handlers import work
from pgqueuer import PgQueuer, Queries
from pgqueuer.db import AsyncpgDriver

URL = os.environ["PEER_URL"]


async def queries():
    return Queries(AsyncpgDriver(await asyncpg.connect(URL)))


async def setup():
    await (await queries()).install()


async def enqueue(kind, count):
    rows = [json.dumps([kind, number]).encode() for number in range(count)]
    await (await queries()).enqueue(["job"] * count, rows, [0] * count)


async def status():
    connection = await asyncpg.connect(URL)
    left = await connection.fetchval("SELECT count(*) FROM pgqueuer")
    ended = await connection.fetchval(
        "SELECT count(DISTINCT job_id) FROM pgqueuer_log"
        " WHERE status IN ('successful', 'exception', 'failed')"
    )
    print(json.dumps({"ended": ended, "left": left}))


async def serve():
    pgq = PgQueuer(AsyncpgDriver(await asyncpg.connect(URL)))

    @pgq.entrypoint("job")
    async def job(row):
        await asyncio.to_thread(work, *json.loads(row.payload))

    await pgq.run(
        batch_size=4,
        max_concurrent_tasks=8,
        dequeue_timeout=timedelta(seconds=0.5),
        heartbeat_timeout=timedelta(seconds=5),
    )


if __name__ == "__main__":
    commands = {"setup": setup, "status": status, "serve": serve}
    if sys.argv[1] == "enqueue":
        asyncio.run(enqueue(sys.argv[2], int(sys.argv[3])))
    else:
        asyncio.run(commands[sys.argv[1]]())
