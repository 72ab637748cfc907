"""The last screen: what has happened, and the proof that nothing was lost or done twice."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import click
from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session, joinedload

from pgqueue.demo.crew import Killed
from pgqueue.demo.indexer import ModuleStats, queue
from pgqueue.demo.sources import short_name
from pgqueue.models import Job, JobAttempt, JobStatus
from pgqueue.terminal import print_table

SHOWN_MODULES = 5
SHOWN_FAILURES = 12


def show_closing(session: Session, killed: Killed | None, *, jobs: int, seconds: float) -> bool:
    """Print everything; returns whether all that was promised held."""
    by_status = _count_by_status(session)
    counts = ", ".join(f"{number:,} {status}" for status, number in by_status.items())
    rate = f"{jobs / seconds:,.0f} a second"
    click.echo(f"\n{jobs:,} jobs in {seconds:.1f} s, {rate}: {counts}.\n")
    _show_modules(session)
    _show_failures(session)
    was_killed = _show_killed(session, killed)
    return _prove(session, by_status) and was_killed


def _count_by_status(session: Session) -> dict[str, int]:
    counts = select(Job.status, func.count()).group_by(Job.status).order_by(Job.status.desc())
    return {status.value: number for status, number in session.execute(counts)}


def _show_modules(session: Session) -> None:
    click.echo("The longest functions, from a join of ModuleStats and Job")
    longest = (
        select(ModuleStats)
        .join(ModuleStats.job)
        .options(joinedload(ModuleStats.job))
        .where(Job.status == JobStatus.SUCCEEDED)
        .order_by(ModuleStats.longest_function_lines.desc(), ModuleStats.job_id)
        .limit(SHOWN_MODULES)
    )
    rows = [
        [
            short_name(stats.path),
            stats.lines,
            stats.classes,
            stats.functions,
            stats.longest_function,
            stats.longest_function_lines,
            stats.job_id,
        ]
        for stats in session.scalars(longest)
    ]
    headings = ["file", "lines", "classes", "functions", "longest", "its lines", "job"]
    print_table(headings, rows)


def _show_failures(session: Session) -> None:
    failed = (
        select(Job, JobAttempt.error_type)
        .join(JobAttempt, and_(JobAttempt.job_id == Job.id, JobAttempt.attempt == Job.attempts))
        .where(Job.status == JobStatus.FAILED)
        .order_by(Job.id)
    )
    rows = [
        [short_name(job.args["path"]), job.attempts, f"{error_type}: {job.last_error}"]
        for job, error_type in session.execute(failed)
    ]
    click.echo(f"\nThe {len(rows)} files that failed, tried again with a pause, then given up")
    print_table(["file", "attempts", "last error"], rows[:SHOWN_FAILURES])
    if len(rows) > SHOWN_FAILURES:
        click.echo(f"... and {len(rows) - SHOWN_FAILURES} more")


def _show_killed(session: Session, killed: Killed | None) -> bool:
    if killed is None:
        click.echo("\nThe jobs had ended before a worker could be killed: take a larger --limit.")
        return False
    away = _times_away(session, killed)
    click.echo(f"\nThe killed worker {killed.pid} held {len(away)} jobs.", nl=not away)
    if away:
        first, last = away[0].total_seconds(), away[-1].total_seconds()
        click.echo(f"  They were running again {first:.2f} to {last:.2f} s after its death.")
    return bool(away)


def _times_away(session: Session, killed: Killed) -> list[timedelta]:
    """From the kill to the next start of each job that the killed worker held, in order."""
    crashed = select(JobAttempt).where(
        JobAttempt.worker_id == killed.worker_id, JobAttempt.outcome == "crashed"
    )
    return sorted(_next_start(session, attempt) - killed.at for attempt in session.scalars(crashed))


def _next_start(session: Session, crashed: JobAttempt) -> Any:
    """When the next attempt began: on record if it failed too, else it is the job's last."""
    following = select(func.min(JobAttempt.started_at)).where(
        JobAttempt.job_id == crashed.job_id, JobAttempt.attempt > crashed.attempt
    )
    return session.scalar(following) or session.get_one(Job, crashed.job_id).started_at


def _prove(session: Session, by_status: dict[str, int]) -> bool:
    rows = session.scalars(select(func.count()).select_from(ModuleStats)).one()
    succeeded = by_status.get(JobStatus.SUCCEEDED, 0)
    violations: Sequence[object] = queue.check(session)
    is_equal, is_sound = rows == succeeded, not violations
    click.echo("\nProof")
    click.echo(
        f"  {_verdict(is_equal)}: {rows:,} rows in module_stats = {succeeded:,} jobs succeeded"
    )
    click.echo(f"  {_verdict(is_sound)}: {len(violations)} invariant violations = 0")
    for violation in violations[:5]:
        click.echo(f"    {violation}")
    return is_equal and is_sound


def _verdict(is_true: bool) -> str:
    return "holds" if is_true else "BROKEN"
