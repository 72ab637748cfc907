"""pq on psycopg2: the PostgreSQL queue that enqueues one job fastest.  It has no worker."""

import psycopg2
from pq import PQ
from protocol import Adapter, main, url


class PqAdapter(Adapter):
    def setup(self):
        with psycopg2.connect(url()) as connection:
            PQ(connection).create()

    def connect(self):
        self.queue = PQ(psycopg2.connect(url()))["benchmark"]
        self.looking = psycopg2.connect(url())
        self.looking.autocommit = True

    def empty(self):
        self.looking.cursor().execute("TRUNCATE queue RESTART IDENTITY")

    def enqueue(self, number):
        self.queue.put({"number": number})

    def left(self):
        with self.looking.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM queue WHERE dequeued_at IS NULL")
            return cursor.fetchone()[0]


if __name__ == "__main__":
    main(PqAdapter)
