"""The stage: a database, two workers, one of them killed, and the numbers at the end."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
from sqlalchemy import func, inspect, select, text
from sqlalchemy.orm import Session

from pgqueue.demo import SCHEMA_OF_DEMO
from pgqueue.demo.closing import show_closing
from pgqueue.demo.crew import Crew, DemoFailed, Killed
from pgqueue.demo.indexer import Base, index, queue
from pgqueue.demo.progress import Bar, Lines, progress
from pgqueue.demo.sources import BROKEN, python_files
from pgqueue.embedded import EmbeddedPostgres
from pgqueue.models import Job

LOOK_EVERY = 0.05
PATIENCE = 60.0
"""Seconds without any job ending after which the demo gives up."""


def perform(*, url: str | None, workers: int, limit: int, seed: int, keep: bool) -> None:
    """Run the demo; the process exits with 1 when what it promises does not hold."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        with ExitStack() as stack:
            _set_up(stack, url=url, keep=keep)
            log = Path(stack.enter_context(tempfile.TemporaryDirectory()), "workers.log")
            crew = stack.enter_context(Crew(log))
            is_sound = _play(crew, python_files(limit=limit, seed=seed), workers)
    except KeyboardInterrupt:
        click.echo("\nStopped. The workers have ended, and nothing is left behind.", err=True)
        sys.exit(130)
    if not is_sound:
        sys.exit(1)


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def _set_up(stack: ExitStack, *, url: str | None, keep: bool) -> None:
    """Bind the application to a database that has its tables; all of it goes with the stack."""
    click.echo("pgqueue demo: one job for each Python file of this machine\n")
    if url is None:
        click.echo("  Starting a PostgreSQL of its own, which goes when the demo ends.")
        server = stack.enter_context(EmbeddedPostgres())
    # The workers read the variable, as they would in production.
    os.environ["PGQUEUE_URL"] = url or server.url
    queue.bind(os.environ["PGQUEUE_URL"])
    stack.callback(queue.engine.dispose)
    if url is not None:
        stack.enter_context(_own_schema(keep=keep))
    queue.upgrade()
    Base.metadata.create_all(queue.engine)


@contextmanager
def _own_schema(*, keep: bool) -> Iterator[None]:
    if inspect(queue.engine).has_schema(SCHEMA_OF_DEMO):
        raise DemoFailed(
            f"This database has a schema {SCHEMA_OF_DEMO} already: another demo runs, or one was "
            f"kept. Run `DROP SCHEMA {SCHEMA_OF_DEMO} CASCADE` to be rid of it."
        )
    end = "stays" if keep else "is dropped at the end"
    click.echo(f"  On your server: all tables are made in schema {SCHEMA_OF_DEMO}, which {end}.")
    try:
        yield
    finally:
        if not keep:
            with queue.engine.begin() as connection:
                connection.execute(text(f"DROP SCHEMA IF EXISTS {SCHEMA_OF_DEMO} CASCADE"))


def _play(crew: Crew, paths: list[str], workers: int) -> bool:
    """The demo itself; returns whether all it promises held."""
    with queue.session() as session:
        _start_workers(crew, session, workers)
        began = time.monotonic()
        index.enqueue_many(session, [(path,) for path in paths])
        session.commit()
        broken = len(list(BROKEN.glob("*.broken")))
        click.echo(
            f"  Enqueued {len(paths):,} files in one transaction, {broken} of them broken on "
            f"purpose, in {time.monotonic() - began:.1f} s.\n"
        )
        with progress(len(paths)) as shown:
            killed = _watch(crew, session, len(paths), shown)
        seconds = time.monotonic() - began
        _wait_for_workers(crew, session)  # the others may have been quicker than a new one's start
        crew.dismiss()
        return show_closing(session, killed, jobs=len(paths), seconds=seconds)


def _start_workers(crew: Crew, session: Session, number: int) -> None:
    for _ in range(number):
        crew.hire()
    pids = ", ".join(map(str, crew.pids))
    click.echo(f"  Starting {number} worker processes: {pids}.")
    _wait_for_workers(crew, session)


def _wait_for_workers(crew: Crew, session: Session) -> None:
    """Return when all are registered; from then on they heed signals."""
    give_up_at = time.monotonic() + PATIENCE
    while not _look(session, crew.are_registered):
        crew.look_after()
        if time.monotonic() > give_up_at:
            raise DemoFailed("the workers have not started after a minute")
        time.sleep(LOOK_EVERY)


def _watch(crew: Crew, session: Session, total: int, shown: Lines | Bar) -> Killed | None:
    """Look on until every job has ended; a third of the way, kill a worker and replace it."""
    killed: Killed | None = None
    ended, moved_at = 0, time.monotonic()
    while ended < total:
        crew.look_after()
        before, ended = ended, _look(session, _count_ended)
        shown.show(ended)
        if ended > before:
            moved_at = time.monotonic()
        elif time.monotonic() - moved_at > PATIENCE:
            raise DemoFailed(f"no job has ended for a minute; {total - ended} are left")
        if killed is None and ended >= total // 3:
            killed = _look(session, crew.kill_at_work)
            if killed is not None:
                shown.say(f"  Killed worker {killed.pid} with SIGKILL, in the middle of its jobs.")
                shown.say(f"  Worker {crew.hire()} takes its place.")
        time.sleep(LOOK_EVERY)
    return killed


def _count_ended(session: Session) -> int:
    return session.scalars(select(func.count()).where(Job.outcome.is_not(None))).one()


def _look(session: Session, question: Any) -> Any:
    """Ask in a transaction of its own, so that each look sees what is new."""
    with session.begin():
        return question(session)
