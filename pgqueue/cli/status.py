"""``pgqueue status``: the jobs by status, and the workers."""

import json
from typing import Any

import click
from sqlalchemy import select
from sqlalchemy.orm import Session

from pgqueue.cli.app_loader import opened
from pgqueue.cli.doctor import words_for_unknown, words_for_unreadable
from pgqueue.job_queue import PgQueue
from pgqueue.models import JobStatus, Lease, PausedTask, QueueSettings, WorkerProcess
from pgqueue.repository import Health, StatusCount, Unreadable, Waiting
from pgqueue.statements.tables import clock, count_rows
from pgqueue.terminal import harmless, print_table

COUNTED = 200_000
"""Up to this number all jobs are counted; above it, some statuses only with --exact."""
QUIET = "(quiet)"
ONLY_IN_JOBS = (JobStatus.SUCCEEDED,)
"""Statuses without a narrow table, which are counted only by reading all of ``jobs``."""


def show_status(queue: PgQueue, *, exact: bool, as_json: bool) -> None:
    with opened(queue) as session:
        about = Health(session).about_jobs()
        all_counted = exact or about <= COUNTED
        counts = queue.counts(session) if all_counted else Health(session).counts_but_succeeded()
        queues, workers = _queues(counts, session, all_counted), live_workers(session)
        unknown = Health(session).unknown_tasks(queue.tasks) if queue.tasks else []
        unreadable = Health(session).unreadable()
        paused = list(session.scalars(select(PausedTask.task).order_by(PausedTask.task)))
    if as_json:
        found = {"queues": queues, "paused_tasks": paused, "workers": workers}
        found |= _waiting(unknown, unreadable)
        click.echo(json.dumps({**found, "about_jobs": about}, indent=2))
        return
    _print_queues(queues)
    if not all_counted:
        click.echo(f"About {about:,} jobs in all; --exact counts those marked ?, by reading them.")
    if ahead := sum(worker["claimed_ahead"] for worker in workers):
        click.echo(f"The running include {ahead:,} claimed ahead, which start when a slot is free.")
    if paused:
        click.echo(harmless(f"Paused tasks: {', '.join(paused)}."))
    click.echo()
    _print_workers(workers)
    for task in unknown:
        click.echo(harmless(f"\nWarning: {words_for_unknown(task)}"))
    for each in unreadable:
        click.echo(harmless(f"\nWarning: {words_for_unreadable(each)}"))


def _waiting(unknown: list[Waiting], unreadable: list[Unreadable]) -> dict[str, Any]:
    tasks = [
        {"name": task.name, "due_jobs": task.jobs, "oldest_age": task.since.total_seconds()}
        for task in unknown
    ]
    met = [
        {
            "task": each.task,
            "jobs": each.jobs,
            "oldest_age": each.since.total_seconds(),
            "reason": each.reason,
        }
        for each in unreadable
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
            "oldest_due_age": age.total_seconds() if (age := ages.get(name)) else None,
            "jobs": {status.value: jobs[name].get(status.value, 0) for status in JobStatus}
            | ({} if all_counted else {status.value: None for status in ONLY_IN_JOBS}),
        }
        for name in sorted(jobs)
    ]


def live_workers(session: Session) -> list[dict[str, Any]]:
    leases = select(count_rows()).where(Lease.worker_id == WorkerProcess.id).scalar_subquery()
    statement = (
        select(
            WorkerProcess,
            clock() - WorkerProcess.heartbeat_at,
            leases,
        )
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
    if not queues:
        click.echo("No jobs yet.")
        return
    rows = [
        [
            f"{queue['name']} (paused)" if queue["is_paused"] else queue["name"],
            *("?" if count is None else count for count in queue["jobs"].values()),
        ]
        for queue in queues
    ]
    print_table(["queue", *(status.value for status in JobStatus)], rows)


def _print_workers(workers: list[dict[str, Any]]) -> None:
    if not workers:
        click.echo("No worker lives.")
        return
    rows = [
        [
            f"{worker['hostname']}:{worker['pid']}",
            QUIET if worker["is_quiet"] else ", ".join(worker["queues"]),
            worker["slots"],
            worker["jobs"],
            f"{worker['heartbeat_age']:.1f} s ago",
        ]
        for worker in workers
    ]
    print_table(["worker", "queues", "slots", "jobs", "last heartbeat"], rows)
