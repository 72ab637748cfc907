"""A program that forks in the middle of its work, as servers do that load the application first.

``python -m chaos.forking CHILDREN JOBS``.  Every process writes down which server processes it
speaks to before it says a word to them, and which jobs it has committed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from sqlalchemy import create_engine

from chaos import mutations
from chaos.sample_tasks import call, directory, pay, queue
from pgqueue import UsedAcrossFork, Worker
from pgqueue.database.opening import backend_pid
from pgqueue.errors import NotBound

METHODS = ("fork", "spawn", "forkserver")


def bind() -> None:
    """For a process that has inherited no queue: started afresh, or by the server of forks."""
    if bug := os.environ.get("CHAOS_PLANT"):
        mutations.load()[bug](mutations.Patch())
    queue.bind(create_engine(os.environ["CHAOS_URL"], pool_size=2))


def tell(file: str, *what: Any) -> None:
    with (directory() / f"{file}-{os.getpid()}").open("a") as open_file:
        open_file.write(json.dumps(what) + "\n")


def enqueue(jobs: int) -> None:
    with queue.session() as session:
        # Known without asking the server, and so also of a connection that is another's.
        tell("backends", backend_pid(session.connection()))
        ids = [*call.enqueue_many(session, [(0,)] * jobs), pay.enqueue(session).id]
        session.commit()
    tell("acknowledged", *ids)


def work(jobs: int, worker: Worker | None = None) -> None:
    """What each child does: enqueue, and run jobs with a worker of its own."""
    try:
        queue.engine  # noqa: B018 - asked for only to see whether there is one
    except NotBound:
        bind()
    os.environ["CHAOS_WORKER"] = f"child-{os.getpid()}"
    for _ in range(3):
        enqueue(jobs)
    if worker is not None:
        with suppress(UsedAcrossFork):
            worker.run_until_empty(timeout=5)
            raise SystemExit("a Worker of the parent has run in a child")
    Worker(queue, concurrency=2).run_until_empty(timeout=10)


def fork(jobs: int, worker: Worker) -> int:
    """os.fork(), as a preloading server does; the number of the child."""
    if child := os.fork():
        return child
    code = 1
    try:
        work(jobs, worker)
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    children, jobs = map(int, sys.argv[1:])
    bind()
    enqueue(jobs)  # from here on there is a connection that a child must not use
    worker = Worker(queue, concurrency=2)
    over = Event()
    busy = Thread(target=_enqueue_until, args=(over, jobs))
    busy.start()  # another thread is in the middle of a statement while it forks
    forked = [fork(jobs, worker) for _ in range(children)]
    others = []
    for method in METHODS:
        process = multiprocessing.get_context(method).Process(target=work, args=(jobs,))  # type: ignore[attr-defined]
        process.start()
        others.append(process)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in forked]
    for process in others:
        process.join()
        codes.append(process.exitcode)
    over.set()
    busy.join()
    enqueue(jobs)  # and its own connections are whole
    Path(directory() / "codes").write_text(json.dumps(codes))


def _enqueue_until(over: Event, jobs: int) -> None:
    while not over.wait(0.05):
        enqueue(jobs)


if __name__ == "__main__":
    main()
