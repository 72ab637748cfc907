"""pgqueue in a contest."""

import json
import logging
import os
import sys
from datetime import timedelta

sys.path.insert(0, os.path.dirname(__file__))
from handlers import work

from pgqueue import JobStatus, PgQueue, Retry, Worker

queue = PgQueue(os.environ["PEER_URL"])


@queue.task(max_attempts=5, retry=Retry.constant(timedelta(0)))
def job(kind: str, number: int) -> None:
    work(kind, number)


def setup() -> None:
    queue.upgrade()


def enqueue(kind: str, count: int) -> None:
    with queue.session() as session, session.begin():
        job.enqueue_many(session, [(kind, number) for number in range(count)])


def status() -> None:
    with queue.session() as session:
        counts = queue.counts(session)
    is_ended = {True: 0, False: 0}
    for one in counts:
        is_ended[one.status in (JobStatus.SUCCEEDED, JobStatus.FAILED)] += one.jobs
    print(json.dumps({"ended": is_ended[True], "left": is_ended[False]}))


def serve() -> None:
    logging.basicConfig(level=logging.INFO)
    Worker(queue, concurrency=4, poll_interval=timedelta(seconds=0.5)).run()


if __name__ == "__main__":
    {"setup": setup, "status": status, "serve": serve}.get(
        sys.argv[1], lambda: enqueue(sys.argv[2], int(sys.argv[3]))
    )()
