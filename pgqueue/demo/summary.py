"""The summary of the demo: results, failures, and whether a job was lost or done twice."""

from pathlib import Path
from typing import Any

import click
from sqlalchemy import Row, extract, func, select
from sqlalchemy.orm import Session, aliased

from pgqueue.demo.indexer import ModuleStats, queue
from pgqueue.models import Job, JobAttempt, JobStatus
from pgqueue.terminal import print_table


def show_summary(session: Session, killed: Row[Any] | None, seconds: float) -> bool:
    """Print the tables and the checks, and return whether all checks hold."""
    counts = {count.status: count.jobs for count in queue.counts(session)}
    jobs, succeeded = sum(counts.values()), counts[JobStatus.SUCCEEDED]
    ended = f"{succeeded:,} succeeded, {jobs - succeeded:,} failed"
    click.echo(f"\n{jobs:,} jobs in {seconds:.1f} s, {jobs / seconds:,.0f} a second: {ended}.")
    show_modules(session)
    show_failures(session)
    was_killed = show_killed(session, killed)
    rows, violations = session.query(ModuleStats).count(), len(queue.check(session))
    checks = {
        f"{rows:,} rows in module_stats = {succeeded:,} jobs succeeded": rows == succeeded,
        f"{violations} invariant violations": violations == 0,
    }
    click.echo("\nChecks")
    for check, holds in checks.items():
        click.echo(f"  {'holds' if holds else 'BROKEN'}: {check}")
    return was_killed and all(checks.values())


def show_modules(session: Session) -> None:
    longest = (
        select(ModuleStats, Job)
        .join(ModuleStats.job)
        .where(Job.status == JobStatus.SUCCEEDED)
        .order_by(ModuleStats.longest_lines.desc())
        .limit(5)
    )
    rows = [
        [Path(m.path).name, m.lines, m.classes, m.functions, m.longest, m.longest_lines, job.id]
        for m, job in session.execute(longest)
    ]
    click.echo("\nThe longest functions, from a join of ModuleStats and Job")
    print_table(["file", "lines", "classes", "functions", "longest", "its lines", "job"], rows)


def show_failures(session: Session) -> None:
    failed = select(Job).where(Job.status == JobStatus.FAILED).order_by(Job.id).limit(10)
    rows = [[Path(j.args["path"]).name, j.attempts, j.last_error] for j in session.scalars(failed)]
    click.echo("\nThe first files that failed, each tried three times")
    print_table(["file", "attempts", "last error"], rows)


def show_killed(session: Session, killed: Row[Any] | None) -> bool:
    """Print when the jobs of the killed worker were claimable and when they started again; return
    whether it held any."""
    if killed is None:
        click.echo("\nAll jobs ended before a worker could be killed. Use a larger --limit.")
        return False
    later = aliased(JobAttempt)
    is_later = (later.job_id == JobAttempt.job_id) & (later.attempt > JobAttempt.attempt)
    next_failed = select(func.min(later.started_at)).where(is_later).scalar_subquery()
    started_again = func.coalesce(next_failed, Job.started_at)
    crashed = (
        select(
            func.count(),
            extract("epoch", func.max(JobAttempt.finished_at) - killed.killed_at),
            extract("epoch", func.min(started_again) - killed.killed_at),
            extract("epoch", func.max(started_again) - killed.killed_at),
        )
        .join(JobAttempt, JobAttempt.job_id == Job.id)
        .where(JobAttempt.worker_id == killed.id, JobAttempt.outcome == "crashed")
    )
    held, claimable, first, last = session.execute(crashed).one()
    click.echo(f"\nThe killed worker {killed.pid} held {held} jobs.")
    if held:
        click.echo(
            f"  {claimable:.2f} s after its death, all of them were claimable; two seconds are "
            f"promised.\n  They started {first:.2f} to {last:.2f} s after its death, as slots "
            "became free."
        )
    return held > 0
