"""procrastinate in a contest, with the periodic task that its manual tells users to write:
every five seconds, jobs whose worker has not beaten for five seconds are retried."""

import asyncio
import json
import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
import procrastinate
import psycopg
from handlers import work

URL = os.environ["PEER_URL"]
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=URL))


@app.task(name="job", retry=procrastinate.RetryStrategy(max_attempts=5))
def job(kind, number):
    work(kind, number)


async def setup():
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


async def enqueue(kind, count):
    async with app.open_async():
        rows = [{"kind": kind, "number": number} for number in range(count)]
        await job.batch_defer_async(*rows)


async def status():
    connection = await psycopg.AsyncConnection.connect(URL)
    cursor = await connection.execute(
        "SELECT count(*) FILTER (WHERE status IN ('succeeded', 'failed')),"
        " count(*) FILTER (WHERE status IN ('todo', 'doing')) FROM procrastinate_jobs"
    )
    ended, left = await cursor.fetchone()
    print(json.dumps({"ended": ended, "left": left}))


async def retry_stalled():
    while True:
        await asyncio.sleep(5)
        stalled = await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=5)
        for one in stalled:
            await app.job_manager.retry_job(one)


async def serve():
    async with app.open_async():
        retrying = asyncio.create_task(retry_stalled())
        await app.run_worker_async(
            concurrency=4,
            update_heartbeat_interval=1,
            stalled_worker_timeout=5,
            fetch_job_polling_interval=0.5,
            shutdown_graceful_timeout=5,
        )
        retrying.cancel()


if __name__ == "__main__":
    commands = {"setup": setup, "status": status, "serve": serve}
    if sys.argv[1] == "enqueue":
        asyncio.run(enqueue(sys.argv[2], int(sys.argv[3])))
    else:
        asyncio.run(commands[sys.argv[1]]())
