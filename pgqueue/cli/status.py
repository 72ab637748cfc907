"""``pgqueue status``, ``workers``, ``quiet``, ``health``: the jobs by status, and the workers."""

import socket
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen
from uuid import UUID

import click
from sqlalchemy import select
from sqlalchemy.orm import Session

from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.doctor import words_for_unknown, words_for_unreadable
from pgqueue.cli.group import on_database, on_database_with_json
from pgqueue.job_queue import PgQueue
from pgqueue.models import JobStatus, Lease, PausedTask, QueueSettings, WorkerProcess
from pgqueue.repository import Health, StatusCount, Unreadable, Waiting
from pgqueue.statements.tables import clock, count_rows
from pgqueue.terminal import harmless, print_json, print_table
from pgqueue.worker.health import LONGEST_SILENCE

COUNTED = 200_000
"""Up to this number all jobs are counted; above it, the succeeded only with --exact."""
NO_WORKER = "No worker lives."
PATIENCE = 5.0
"""Seconds for the worker to answer."""


@click.command()
@click.option("--exact", is_flag=True, help="Count the succeeded too, however many there are.")
@on_database_with_json
def status(given: CliState, exact: bool, as_json: bool) -> None:
    """Show the number of jobs by queue and status, and the live workers.

    A job is running as soon as it is claimed.  A worker with quick jobs claims more than it has
    slots; the number of jobs claimed ahead is shown below the table.

    \b
    Example:  pgqueue --app shop.jobs:queue status
    """
    queue = given.database()
    with opened(queue) as session:
        about = Health(session).about_jobs()
        all_counted = exact or about <= COUNTED
        counts = queue.counts(session) if all_counted else Health(session).counts_but_succeeded()
        queues, live = _queues(counts, session, all_counted), live_workers(session)
        unknown = Health(session).unknown_tasks(queue.tasks) if queue.tasks else []
        unreadable = Health(session).unreadable()
        paused = list(session.scalars(select(PausedTask.task).order_by(PausedTask.task)))
    if as_json:
        found = {"queues": queues, "paused_tasks": paused, "workers": live}
        found |= _waiting(unknown, unreadable)
        print_json({**found, "about_jobs": about})
        return
    _print_queues(queues)
    if not all_counted:
        click.echo(f"About {about:,} jobs in all; --exact counts those marked ?, by reading them.")
    if ahead := sum(worker["claimed_ahead"] for worker in live):
        click.echo(f"The running include {ahead:,} claimed ahead, which start when a slot is free.")
    if paused:
        click.echo(harmless(f"Paused tasks: {', '.join(paused)}."))
    click.echo()
    _print_workers(live)
    for task in unknown:
        click.echo(harmless(f"\nWarning: {words_for_unknown(task)}"))
    for each in unreadable:
        click.echo(harmless(f"\nWarning: {words_for_unreadable(each)}"))


@click.command()
@on_database_with_json
def workers(given: CliState, as_json: bool) -> None:
    """List the live workers with their ids.

    \b
    Example:  pgqueue --app shop.jobs:queue workers
    """
    with opened(given.database()) as session:
        found = live_workers(session)
    if as_json:
        print_json({"workers": found})
        return
    rows = []
    for worker in found:
        name, queues, beat = _cells(worker)
        rows.append([worker["id"], name, queues, f"{worker['jobs']}/{worker['slots']}", beat])
    columns = ["id", "worker", "queues", "jobs/slots", "last heartbeat"]
    print_table(columns, rows, otherwise=NO_WORKER)


def _worker_ids(_context: click.Context, _option: Any, values: tuple[str, ...]) -> list[UUID]:
    try:
        return [UUID(value) for value in values]
    except ValueError as error:
        raise click.BadParameter("give the ids that `pgqueue workers` shows") from error


@click.command()
@click.argument("worker_ids", metavar="ID...", nargs=-1, required=True, callback=_worker_ids)
@on_database_with_json
def quiet(given: CliState, as_json: bool, worker_ids: list[UUID]) -> None:
    """Make workers claim no more jobs, within a second.

    A quiet worker ends the jobs that it has claimed and then idles; stop it with SIGTERM when
    `pgqueue workers` shows that it has no jobs.  This cannot be undone: start another worker.

    \b
    Example:  pgqueue --app shop.jobs:queue quiet 6f9619ff-8b86-d011-b42d-00c04fc964ff
    """
    queue = given.database()
    with opened(queue) as session:
        are_quiet = {id: queue.quiet(session, id) for id in worker_ids}
        session.commit()
    if as_json:
        found = [{"id": str(id), "is_quiet": is_quiet} for id, is_quiet in are_quiet.items()]
        print_json({"workers": found})
    else:
        for id, is_quiet in are_quiet.items():
            words = "quiet" if is_quiet else "no live worker has this id"
            click.echo(f"{id}: {words}", err=not is_quiet)
    if not all(are_quiet.values()):
        click.get_current_context().exit(1)


@click.command()
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Ask the worker with this --metrics-port; left out, the heartbeats of this host.",
)
@on_database
def health(given: CliState, port: int | None) -> None:
    """Exit with 0 if a worker on this host lives, with 1 if none does.

    With --port, a worker lives if it looks for jobs and PostgreSQL acknowledges its heartbeats.
    Without it, any worker of this host with a recent heartbeat counts.

    \b
    Example:  pgqueue health --port 9187
              pgqueue --app shop.jobs:queue health
    """
    if port is not None:
        _ask_port(port)
    else:
        _ask_database(given.database())


def _ask_port(port: int) -> None:
    """Ask the worker that serves its health on this port of this host."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=PATIENCE) as answer:
            click.echo(answer.read().decode().strip())
    except HTTPError as error:
        raise click.ClickException(error.read().decode().strip()) from error
    except (URLError, OSError) as error:
        raise click.ClickException(
            f"No worker answers on port {port} ({getattr(error, 'reason', error)}); does one run "
            f"with --metrics-port {port}?"
        ) from error


def _ask_database(queue: PgQueue) -> None:
    """Look for workers of this host whose last heartbeat is recent."""
    host = socket.gethostname()
    with opened(queue) as session:
        live = [
            worker
            for worker in live_workers(session)
            if worker["hostname"] == host and worker["heartbeat_age"] < LONGEST_SILENCE
        ]
    if not live:
        raise click.ClickException(f"No worker lives on {host}")
    click.echo(f"Live on {host}: {', '.join(str(worker['pid']) for worker in live)}")


def _waiting(unknown: list[Waiting], unreadable: list[Unreadable]) -> dict[str, Any]:
    tasks = [{"name": one.name, "due_jobs": one.jobs, "oldest_age": one.since} for one in unknown]
    met = [
        {"task": one.task, "jobs": one.jobs, "oldest_age": one.since, "reason": one.reason}
        for one in unreadable
    ]
    return {"unknown_tasks": tasks, "unreadable_jobs": met}


def _queues(counts: list[StatusCount], session: Session, all_counted: bool) -> list[dict[str, Any]]:
    ages = {depth.queue: depth.oldest_due for depth in Health(session).depths()}
    paused_at = QueueSettings.paused_at.is_not(None)
    paused = set(session.scalars(select(QueueSettings.name).where(paused_at)))
    jobs: dict[str, dict[str, int | None]] = {name: {} for name in paused}
    for count in counts:
        jobs.setdefault(count.queue, {})[JobStatus(count.status).value] = count.jobs
    return [
        {
            "name": name,
            "is_paused": name in paused,
            "oldest_due_age": ages.get(name),
            "jobs": {status.value: jobs[name].get(status.value, 0) for status in JobStatus}
            # no narrow table lists the succeeded
            | ({} if all_counted else {JobStatus.SUCCEEDED.value: None}),
        }
        for name in sorted(jobs)
    ]


def live_workers(session: Session) -> list[dict[str, Any]]:
    leases = select(count_rows()).where(Lease.worker_id == WorkerProcess.id).scalar_subquery()
    statement = (
        select(WorkerProcess, clock() - WorkerProcess.heartbeat_at, leases)
        .where(WorkerProcess.dead_at.is_(None))
        .order_by(WorkerProcess.started_at)
    )
    return [
        {
            "id": str(worker.id),
            "hostname": worker.hostname,
            "pid": worker.pid,
            "queues": worker.queues,
            "is_quiet": not worker.queues,
            "slots": worker.slots,
            "jobs": jobs,
            # No lease says whether its job has started, but no more jobs run than there are slots.
            "claimed_ahead": max(0, jobs - worker.slots),
            "started_at": worker.started_at.isoformat(),
            "heartbeat_age": round(age.total_seconds(), 3),
        }
        for worker, age, jobs in session.execute(statement)
    ]


def _print_queues(queues: list[dict[str, Any]]) -> None:
    rows = [
        [
            f"{queue['name']} (paused)" if queue["is_paused"] else queue["name"],
            *("?" if count is None else count for count in queue["jobs"].values()),
        ]
        for queue in queues
    ]
    print_table(["queue", *(status.value for status in JobStatus)], rows, otherwise="No jobs yet.")


def _print_workers(live: list[dict[str, Any]]) -> None:
    rows = []
    for worker in live:
        name, queues, beat = _cells(worker)
        rows.append([name, queues, worker["slots"], worker["jobs"], beat])
    columns = ["worker", "queues", "slots", "jobs", "last heartbeat"]
    print_table(columns, rows, otherwise=NO_WORKER)


def _cells(worker: dict[str, Any]) -> tuple[str, str, str]:
    """Its name, its queues and the age of its heartbeat."""
    return (
        f"{worker['hostname']}:{worker['pid']}",
        ", ".join(worker["queues"]) or "(quiet)",
        f"{worker['heartbeat_age']:.1f} s ago",
    )
