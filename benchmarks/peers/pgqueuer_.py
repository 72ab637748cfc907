"""PgQueuer on asyncpg and uvloop, as its own command runs it; durable, as by default.

Options: ``handler`` (async; sync runs it in a thread, as its error message advises), ``limit`` (its
``concurrency_limit``).
"""

import asyncio
import json
import signal
from datetime import timedelta

import asyncpg
import uvloop
from pgqueuer import PgQueuer, Queries
from pgqueuer.db import AsyncpgDriver
from protocol import (
    AsyncClient,
    Tables,
    main,
    note_start,
    option,
    url,
    wait_for_the_others,
)

CHUNK = 1000


class PgqueuerAdapter(Tables, AsyncClient):
    def setup(self):
        async def install():
            connection = await asyncpg.connect(url())
            await Queries(AsyncpgDriver(connection)).install()
            await connection.close()

        asyncio.run(install())

    def empty(self):
        self.sql("TRUNCATE pgqueuer, pgqueuer_log, pgqueuer_statistics RESTART IDENTITY CASCADE")

    def connect(self):
        async def connected():
            return Queries(AsyncpgDriver(await asyncpg.connect(url())))

        self.queries = self.run(connected())

    async def enqueue(self, number):
        await self.queries.enqueue("nothing", json.dumps({"number": number}).encode())

    def enqueue_bulk(self, first, jobs):
        async def all_of_them():
            for start in range(first, first + jobs, CHUNK):
                numbers = range(start, min(start + CHUNK, first + jobs))
                payloads = [json.dumps({"number": number}).encode() for number in numbers]
                await self.queries.enqueue(["nothing"] * len(numbers), payloads, [0] * len(numbers))

        self.run(all_of_them())

    def left(self):
        return self.sql("SELECT count(*) FROM pgqueuer")[0][0]

    def work(self):
        async def serve():
            queue = PgQueuer(AsyncpgDriver(await asyncpg.connect(url())))

            @queue.entrypoint("nothing", concurrency_limit=option("limit", 0))
            async def nothing(job):
                number = json.loads(job.payload)["number"]
                if option("handler", "async") == "async":
                    note_start(number)
                else:
                    await asyncio.to_thread(note_start, number)

            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, queue.shutdown.set)
            await queue.run(batch_size=option("batch", 500), dequeue_timeout=timedelta(seconds=30))

        wait_for_the_others()
        uvloop.run(serve())


if __name__ == "__main__":
    main(PgqueuerAdapter)
