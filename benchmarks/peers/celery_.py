"""Celery with Redis as its broker and the store of its results, with its defaults: as many
processes as the machine has cores.

The process that enqueues starts a redis-server of its own, which ends with it.  It has an
append-only file with an fsync each second, which its manual advises for durability.

Options: ``graph`` ("fan" is a chord, "chain" a chain).
"""

import atexit
import os
import subprocess
import time
from pathlib import Path

from celery import Celery, chain, chord
from celery.signals import worker_ready
from protocol import Adapter, main, note_start, option, wait_for_the_others
from redis import Redis
from redis.exceptions import ConnectionError as NotThere

FOLDER = Path(os.environ["BENCHMARK_STARTS"]).parent
SOCKET = FOLDER / "redis.sock"
SERVER = ["redis-server", "--port", "0", "--unixsocket", str(SOCKET), "--dir", str(FOLDER)]
DURABLE = ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
READY_WITHIN = 10.0
# By default workers tell each other what they do; one that is alone need not.
ALONE = ["--without-gossip", "--without-mingle", "--without-heartbeat"]

app = Celery("benchmark", broker=f"redis+socket://{SOCKET}", backend=f"redis+socket://{SOCKET}")


@app.task(name="nothing")
def nothing(number):
    note_start(number)


def fan(numbers):
    root, *parts, last = [nothing.si(number) for number in numbers]
    return chain(root, chord(parts, last))


def chain_of(numbers):
    return chain(*[nothing.si(number) for number in numbers])


GRAPHS = {"fan": fan, "chain": chain_of}


class CeleryAdapter(Adapter):
    def setup(self):
        server = subprocess.Popen([*SERVER, *DURABLE], stdout=subprocess.DEVNULL)
        atexit.register(end, server)
        self.redis = Redis(unix_socket_path=str(SOCKET))
        deadline = time.monotonic() + READY_WITHIN
        while not self.answers():
            if time.monotonic() > deadline or server.poll() is not None:
                raise RuntimeError("redis-server does not answer")
            time.sleep(0.01)

    def answers(self):
        try:
            return self.redis.ping()
        except NotThere:
            return False

    def empty(self):
        self.redis.flushall()

    def enqueue_bulk(self, first, jobs):
        GRAPHS[option("graph", None)](range(first, first + jobs)).delay()

    def left(self):
        return self.redis.llen("celery") + self.redis.hlen("unacked")

    def work(self):
        worker_ready.connect(lambda **_: wait_for_the_others(), weak=False)
        app.worker_main(["worker", "-l", "ERROR", *ALONE])


def end(server):
    server.terminate()
    server.wait()


if __name__ == "__main__":
    main(CeleryAdapter)
