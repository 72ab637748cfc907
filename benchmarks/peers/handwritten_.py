"""What people write by hand: one job, one transaction, FOR UPDATE SKIP LOCKED.

Options: ``client`` ("psycopg", or "session": a Session of SQLAlchemy), ``concurrency``.
"""

import json
import signal
import threading
from functools import cache

import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks.peers.protocol import (
    Adapter,
    Tables,
    main,
    note_start,
    option,
    url,
    wait_for_the_others,
)

TABLES = """
    CREATE TABLE IF NOT EXISTS todo (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        args jsonb NOT NULL,
        done_at timestamptz
    );
    CREATE INDEX IF NOT EXISTS todo_open ON todo (id) WHERE done_at IS NULL;
    CREATE TABLE IF NOT EXISTS effects (job bigint)
"""
INSERT = "INSERT INTO effects (job) VALUES (:number)"
DONE = "UPDATE todo SET done_at = clock_timestamp() WHERE id = :id"
TAKE = """
    SELECT id, CAST(args AS text) AS args FROM todo WHERE done_at IS NULL
    ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
"""


class HandwrittenAdapter(Tables, Adapter):
    def setup(self):
        self.sql(TABLES)

    def empty(self):
        self.sql("TRUNCATE todo, effects")

    def enqueue_bulk(self, first, jobs):
        self.sql(
            "INSERT INTO todo (args) SELECT jsonb_build_object('number', number)"
            " FROM generate_series(%s::int, %s::int) AS number",
            first,
            first + jobs - 1,
        )

    def left(self):
        return self.sql("SELECT count(*) FROM todo WHERE done_at IS NULL")[0][0]

    def work(self):
        stopping = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stopping.set())
        wait_for_the_others()
        threads = [
            threading.Thread(target=CLIENTS[option("client", "psycopg")], args=(stopping,))
            for _ in range(option("concurrency", 10))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def serve_with_session(stopping):
    take, insert, done = sa.text(TAKE), sa.text(INSERT), sa.text(DONE)
    while not stopping.is_set():
        with Session(engine()) as session, session.begin():
            row = session.execute(take).first()
            if row is not None:
                number = json.loads(row.args)["number"]
                note_start(number)
                session.execute(insert, {"number": number})
                session.execute(done, {"id": row.id})
        if row is None:
            stopping.wait(0.05)


@cache
def engine():
    address = url().replace("postgresql://", "postgresql+psycopg://")
    return sa.create_engine(address, pool_size=option("concurrency", 10))


def serve_with_psycopg(stopping):
    with psycopg.connect(url()) as connection:
        while not stopping.is_set():
            with connection.transaction():
                row = connection.execute(TAKE).fetchone()
                if row is not None:
                    number = json.loads(row[1])["number"]
                    note_start(number)
                    connection.execute("INSERT INTO effects (job) VALUES (%s)", (number,))
                    connection.execute(
                        "UPDATE todo SET done_at = clock_timestamp() WHERE id = %s", (row[0],)
                    )
            if row is None:
                stopping.wait(0.05)


CLIENTS = {"psycopg": serve_with_psycopg, "session": serve_with_session}


if __name__ == "__main__":
    main(HandwrittenAdapter)
