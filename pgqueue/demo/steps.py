"""The steps of the demo: tables, jobs, workers, a killed worker, a summary."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import click
from sqlalchemy import Select, func, inspect, select, text

from pgqueue.demo import DEMO_SCHEMA
from pgqueue.demo.indexer import Base, index, queue
from pgqueue.demo.summary import show_summary
from pgqueue.embedded import EmbeddedPostgres
from pgqueue.models import Job, Lease, WorkerProcess

WORKER = [sys.executable, "-m", "pgqueue", "--app", "pgqueue.demo.indexer:queue", "worker"]
BROKEN = sorted(Path(__file__).with_name("broken").glob("*.broken"))


def run_steps(*, url: str | None, workers: int, limit: int, seed: int, keep: bool) -> bool:
    """Run the demo and return whether all checks of the summary hold."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    click.echo("pgqueue demo: a job for each module of the standard library\n")
    with ExitStack() as stack:
        if url is None:
            click.echo("  Starting an embedded PostgreSQL, which is removed at the end.")
            url = stack.enter_context(EmbeddedPostgres()).url
        stack.enter_context(tables(url, keep=keep))
        paths = python_files(limit=limit, seed=seed)
        with queue.session() as session, session.begin():
            index.enqueue_many(session, [(path,) for path in paths])
        click.echo(f"  Enqueued {len(paths):,} files in one transaction.")
        processes = [start_worker(stack) for _ in range(workers)]
        pids = ", ".join(str(process.pid) for process in processes)
        click.echo(f"  Started {workers} worker processes: {pids}.\n")
        began = time.monotonic()
        killed = watch(stack, processes, len(paths))
        with queue.session() as session:
            return show_summary(session, killed, time.monotonic() - began)


@contextmanager
def tables(url: str, *, keep: bool) -> Iterator[None]:
    """Create the tables in a separate schema, and drop the schema at the end."""
    os.environ["PGQUEUE_URL"] = url  # the workers read it
    queue.bind(url)
    if inspect(queue.engine).has_schema(DEMO_SCHEMA):
        raise click.ClickException(
            f"This database has a schema {DEMO_SCHEMA} already: another demo runs, or one was run "
            f"with --keep. Run `DROP SCHEMA {DEMO_SCHEMA} CASCADE` to remove it."
        )
    click.echo(f"  Creating the tables in the schema {DEMO_SCHEMA}.")
    try:
        queue.upgrade()
        Base.metadata.create_all(queue.engine)
        yield
    finally:
        if not keep:
            with queue.engine.begin() as connection:
                connection.execute(text(f"DROP SCHEMA IF EXISTS {DEMO_SCHEMA} CASCADE"))


def python_files(*, limit: int, seed: int) -> list[str]:
    """Return the broken files and a sample of the standard library."""
    files = Path(sysconfig.get_path("stdlib")).rglob("*.py")
    modules = sorted(path for path in files if "site-packages" not in path.parts)
    random.Random(seed).shuffle(modules)  # noqa: S311  # not a secret
    return [str(path) for path in (BROKEN + modules)[:limit]]


def start_worker(stack: ExitStack) -> subprocess.Popen[bytes]:
    """Start a worker process and arrange for its end."""
    # A separate session: Ctrl-C reaches only the demo, which then stops its workers.
    process = subprocess.Popen(WORKER, stderr=subprocess.DEVNULL, start_new_session=True)  # noqa: S603
    stack.enter_context(process)
    stack.callback(process.terminate)
    return process


def watch(stack: ExitStack, processes: list[subprocess.Popen[bytes]], jobs: int) -> Any:
    """Wait until all jobs have ended.  After a tenth of them, kill a worker and start another."""
    killed: Any = None
    looks = count()
    with progress(jobs) as show:
        while (ended := ask(select(func.count(Job.outcome)))[0]) < jobs:
            if next(looks) % 20 == 0:
                show(ended)
            if not killed and ended >= jobs // 10 and (killed := kill_worker()):
                processes.append(new := start_worker(stack))
                click.echo(f"  Killed worker {killed.pid} with SIGKILL; {new.pid} replaces it.")
            if all(process.poll() is not None for process in processes):
                raise click.ClickException("All workers have ended by themselves.")
            time.sleep(0.05)
    return killed


@contextmanager
def progress(jobs: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many jobs have ended, as a progress bar or as lines."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.progress import Progress

        with Progress(transient=True) as bar:
            task = bar.add_task(" ", total=jobs)
            yield lambda ended: bar.update(task, completed=ended)
    else:
        yield lambda ended: click.echo(f"  {ended:>6,} of {jobs:,} jobs have ended.")


def kill_worker() -> Any:
    """Send SIGKILL to the worker with the most leases, if any worker has one."""
    worker = ask(
        select(WorkerProcess.id, WorkerProcess.pid, func.clock_timestamp().label("killed_at"))
        .join(Lease, Lease.worker_id == WorkerProcess.id)
        .group_by(WorkerProcess.id)
        .order_by(func.count().desc())
    )
    if worker is not None:
        os.kill(worker.pid, signal.SIGKILL)
    return worker


def ask(statement: Select[Any]) -> Any:
    """Run a query in a separate transaction and return its first row."""
    with queue.session() as session:
        return session.execute(statement).first()
