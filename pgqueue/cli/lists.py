"""The commands that list jobs, queues, workers, schedules, limits and batches."""

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import click

from pgqueue.checks import check_queue_name
from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.app_options import Decorator
from pgqueue.cli.nodes import on_nodes
from pgqueue.cli.options import (
    FILTERS,
    OF_PAGE,
    as_job_id,
    as_span,
    chosen_jobs,
    complete_queue,
    hint_at_names,
    on_database,
    on_database_with_json,
    together,
    which_jobs,
)
from pgqueue.errors import OptionError
from pgqueue.filter_line import in_hex
from pgqueue.job_queue import PgQueue
from pgqueue.models import JobStatus
from pgqueue.nodes import Node
from pgqueue.operations.actions import ACTIONS
from pgqueue.redaction import redacted, redacted_data
from pgqueue.rules.served_queues import serves
from pgqueue.terminal import as_data, harmless, print_json, print_table
from pgqueue.views import QueueView, ScheduleView
from pgqueue.views.findings import words_for_overdue, words_for_unknown, words_for_unreadable
from pgqueue.views.jobs import PageStart, text_of_start
from pgqueue.views.limits import LimitState
from pgqueue.views.log import target_in_words
from pgqueue.views.queues import WorkerState
from pgqueue.views.tasks import KEPT
from pgqueue.views.words import span

LONGEST_ERROR = 80
"""Characters of an error shown in a list; ``jobs show`` shows all."""
COUNTED = 200_000
"""Up to this number all jobs are counted; above it, the succeeded only with --exact."""
PATIENCE = timedelta(seconds=2)
"""How long a list of jobs is searched."""
MOST_PAUSED = 1000
"""Paused tasks that are named."""


@dataclass(frozen=True, slots=True)
class View:
    """How one command prints what it has found."""

    key: str
    """The key of the JSON document."""
    columns: Mapping[str, Callable[[Any], str | int]]
    """The cell of each column, from a line."""
    otherwise: str
    """What to print if nothing was found."""
    document: Callable[[PgQueue, Any], Any] = lambda _queue, one: one
    """One thing as JSON data."""
    lines: Callable[[Any], Iterable[Any]] = lambda one: [one]
    """The lines of one thing in the table."""
    warning: Callable[[PgQueue, Any], str | None] = lambda _queue, _one: None
    """What is wrong with one thing, told below the table."""


def print_list(
    view: View, queue: PgQueue, found: Iterable[Any], *, as_json: bool, **more: Any
) -> None:
    """Print a table, or a JSON document with these and ``more`` keys."""
    if as_json:
        print_json({view.key: [view.document(queue, one) for one in found], **more})
        return
    print_rows(view, found)
    for one in found:
        if words := view.warning(queue, one):
            click.echo(harmless(f"\nWarning: {words}"))


def print_rows(view: View, found: Iterable[Any], *, without: str | None = None) -> None:
    """Print the table of a list, perhaps without one of its columns."""
    columns = {name: cell for name, cell in view.columns.items() if name != without}
    rows = [[cell(line) for cell in columns.values()] for one in found for line in view.lines(one)]
    print_table([*columns], rows, otherwise=view.otherwise)


def local(time: datetime) -> str:
    """A time in the reader's own time zone, with its offset."""
    return time.astimezone().isoformat(sep=" ", timespec="seconds")


def _capacity(limit: LimitState) -> str:
    declared = f" (in the code {limit.words(limit.declared)})"
    return f"{limit.words(limit.capacity)}{declared if limit.is_set else ''}"


def _shortened(error: str | None) -> str:
    line = redacted(error or "").strip().partition("\n")[0]
    return line if len(line) <= LONGEST_ERROR else f"{line[: LONGEST_ERROR - 3]}..."


def _span(value: timedelta | None) -> str:
    return "-" if value is None else span(value)


def _rate(per_minute: float | None) -> str:
    return "-" if per_minute is None else f"{float(f'{per_minute:.2g}'):,g}"


def _count(status: JobStatus, queue: Mapping[str, Any]) -> str | int:
    count: int | None = queue["jobs"][status.value]
    return "?" if count is None else count


def _queue(one: QueueView) -> dict[str, Any]:
    flow = one.flow
    return {
        "name": one.name,
        "is_paused": one.paused_at is not None,
        "oldest_due_age": one.oldest_due,
        "in_per_minute": None if flow is None else flow.in_per_minute,
        "out_per_minute": None if flow is None else flow.out_per_minute,
        "empty_in": None if flow is None else flow.empty_in(one.count.backlog),
        "jobs": {status.value: count for status, count in (one.jobs or {}).items()},
    }


def _empty(name: str) -> dict[str, Any]:
    """A queue that has no jobs."""
    unknown = dict.fromkeys(("oldest_due_age", "in_per_minute", "out_per_minute", "empty_in"))
    jobs = dict.fromkeys((status.value for status in JobStatus), 0)
    return {"name": name, "is_paused": False, **unknown, "jobs": jobs}


def _worker(worker: WorkerState) -> dict[str, Any]:
    first = (
        "id",
        "hostname",
        "pid",
        "queues",
        "is_live",
        "is_quiet",
        "slots",
        "claimed_ahead",
        "started_at",
    )
    same = (*first, "heartbeat_age", "attempts_ended", "version")
    return {
        **{name: getattr(worker, name) for name in same},
        "jobs": len(worker.jobs),
        "holds": worker.jobs,
    }


def _oldest_job(worker: WorkerState) -> str:
    if not worker.jobs:
        return ""
    oldest = worker.jobs[0]
    return f"{oldest.job_id} {oldest.task} since {local(oldest.since)}"


class _Run(NamedTuple):
    """A line of the schedules: one of the next runs, the first line with the schedule's name."""

    view: ScheduleView
    number: int
    at: datetime | None
    """In the zone of the schedule."""


def _runs(view: ScheduleView) -> list[_Run]:
    # Without a next run if this system cannot read the rule; the line below the table says so.
    return [_Run(view, number, at) for number, at in enumerate(view.next_runs or [None])]


def _note(run: _Run) -> str:
    if run.number > 0:
        return ""
    if not run.view.is_written:
        return "of the code; the next worker that starts writes it"
    return "paused" if run.view.state.paused_at else "" if run.at else "no next run"


def _schedule(queue: PgQueue, view: ScheduleView) -> dict[str, Any]:
    state = view.state
    same = ("name", "task", "cron", "every", "timezone", "days", "catch_up", "overlap")
    return {
        **{name: getattr(state, name) for name in (*same, "declared_in")},
        "is_written": view.is_written,
        "is_paused": state.paused_at is not None,
        "last_tick_at": state.last_tick_at,
        "last_job_id": state.last_job_id,
        "next_runs": [
            {"local": at.isoformat(), "utc": at.astimezone(UTC).isoformat()}
            for at in view.next_runs
        ],
        "overdue": words_for_overdue(queue, state),
    }


JOBS = View(
    "jobs",
    {
        "id": lambda job: str(job.id),
        "status": lambda job: job.status.value,
        "task": lambda job: job.task,
        "queue": lambda job: job.queue,
        "attempts": lambda job: f"{job.attempts}/{job.max_attempts}",
        "created": lambda job: local(job.created_at),
        "last error": lambda job: _shortened(job.last_error),
    },
    otherwise="No job fits.",
    document=lambda _queue, job: redacted_data(as_data(job)),
)

QUEUES = View(
    "queues",
    {"queue": lambda one: f"{one['name']} (paused)" if one["is_paused"] else one["name"]}
    | {status.value: partial(_count, status) for status in JobStatus}
    | {
        "in/min": lambda one: _rate(one["in_per_minute"]),
        "out/min": lambda one: _rate(one["out_per_minute"]),
        "empty in": lambda one: _span(one["empty_in"]),
    },
    otherwise="No jobs yet.",
)

WORKERS = View(
    "workers",
    {
        "id": lambda one: str(one.id),
        "worker": lambda one: f"{one.hostname}:{one.pid}",
        "queues": lambda one: ", ".join(one.queues) or "(quiet)",
        "jobs/slots": lambda one: f"{len(one.jobs)}/{one.slots}",
        "last heartbeat": lambda one: (
            f"{one.heartbeat_age.total_seconds():.1f} s ago{'' if one.is_live else ' (silent)'}"
        ),
        "ended": lambda one: one.attempts_ended,
        "version": lambda one: one.version or "",
        "oldest job": _oldest_job,
    },
    otherwise="No worker lives.",
    document=lambda _queue, one: _worker(one),
)

SCHEDULES = View(
    "schedules",
    {
        "schedule": lambda run: "" if run.number else run.view.state.name,
        "task": lambda run: "" if run.number else run.view.state.task,
        "rule": lambda run: "" if run.number else run.view.rule,
        "next runs": lambda run: run.at.strftime("%a %Y-%m-%d %H:%M:%S %z") if run.at else "",
        "in UTC": lambda run: f"{run.at.astimezone(UTC):%Y-%m-%d %H:%M:%S}" if run.at else "",
        "": _note,
    },
    otherwise="No schedules.",
    document=_schedule,
    lines=_runs,
    warning=lambda queue, view: words_for_overdue(queue, view.state) if view.is_written else None,
)

LIMITS = View(
    "limits",
    {
        "limit": lambda one: one.name,
        "capacity": _capacity,
        "held": lambda one: one.held,
        "waiting": lambda one: one.waiting,
    },
    otherwise="No worker has declared a limit.",
)

BATCHES = View(
    "batches",
    {
        "batch": lambda one: one.id,
        "name": lambda one: one.name or "-",
        "outcome": lambda one: one.outcome or "open",
        "ended": lambda one: f"{one.ended} of {one.total}",
        "failed": lambda one: one.failed,
        "cancelled": lambda one: one.cancelled,
    },
    otherwise="There are no batches.",
)


FAILURES = View(
    "failures",
    {
        "failed": lambda one: one.failed_jobs,
        "attempts": lambda one: one.attempts,
        "task": lambda one: one.task,
        "error": lambda one: f"{one.error_type}: {_shortened(one.message)}",
        "first": lambda one: local(one.first_at),
        "last": lambda one: local(one.last_at),
        "version": lambda one: one.first_version or "-",
        "job": lambda one: str(one.job_id),
        "--error": lambda one: in_hex(one.fingerprint),
    },
    otherwise="No errors.",
    document=lambda _queue, one: redacted_data(
        as_data(one) | {"fingerprint": in_hex(one.fingerprint)}
    ),
)

LOG = View(
    "log",
    {
        "id": lambda one: str(one.id),
        "at": lambda one: local(one.at),
        "actor": lambda one: one.actor,
        "action": lambda one: one.action,
        "target": lambda one: redacted(target_in_words(one, show_arguments=True)),
        "jobs": lambda one: one.jobs,
        "skipped": lambda one: one.skipped,
        "reason": lambda one: redacted(one.reason),
        "": lambda one: "" if one.finished_at else "not finished",
    },
    otherwise="No action.",
    document=lambda _queue, one: redacted_data(as_data(one)),
)

STATISTICS = View(
    "stats",
    {
        "task": lambda one: one.task,
        **{name: attrgetter(name) for name in ("ended", "failed", "retried")},
        "wait p50": lambda one: _span(one.wait_p50),
        "wait p95": lambda one: _span(one.wait_p95),
        "run p50": lambda one: _span(one.run_p50),
        "run p95": lambda one: _span(one.run_p95),
    },
    otherwise="No attempt has ended in this time.",
)


@click.command("list")
@which_jobs(JobStatus, filters=OF_PAGE)
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many."
)
@on_database_with_json
@on_nodes()
def list_jobs(
    given: CliState,
    /,
    as_json: bool,
    limit: int,
    statuses: Sequence[str],
    before: PageStart | None,
    **words: Any,
) -> None:
    """List jobs: waiting ones in the order in which they start, others the newest first.

    For the next page, repeat the command with the --before that it prints.  Is fast beside millions
    of waiting or ended jobs.  A search for a rare job stops after two seconds, and says how far
    back it has searched.

    \b
    Example:  pgqueue --app shop.jobs:queue jobs list --status pending --status running
    """
    chosen = chosen_jobs(statuses, **words)
    queue = given.database()
    with opened(queue) as session:
        try:
            page = queue.views.jobs(session, chosen, limit=limit, start=before, patience=PATIENCE)
        except OptionError as error:
            raise click.BadParameter(str(error), param_hint="--before") from error
    following = page.next_start
    shown = (
        following if following is None or isinstance(following, int) else text_of_start(following)
    )
    more = {"next_before": shown, "searched_to": page.searched_to}
    print_list(JOBS, queue, page.jobs, as_json=as_json, **more)
    if as_json:
        return
    if not page.jobs:
        hint_at_names(queue, task=chosen.which.task, queue_name=chosen.which.queue)
    if page.searched_to is not None:
        click.echo(f"Searched up to {local(page.searched_to)}: go on by --before {shown}", err=True)
    elif shown is not None:
        are = "older ones" if isinstance(shown, int) else "more"
        click.echo(f"There are {are}: add --before {shown}", err=True)


def _status_of_all(found: Mapping[Node, list[dict[str, Any]]], as_json: bool) -> None:
    """The queues of several nodes, those of one name added up."""
    name = itemgetter("name")
    by_name = groupby(sorted(chain(*found.values()), key=name), name)
    queues = [_added_up(name, list(parts)) for name, parts in by_name]
    if as_json:
        print_json({"queues": queues})
    else:
        print_rows(QUEUES, queues)


def _added_up(name: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One queue of several nodes: what is not known of one part is not known of the whole."""

    def whole(join: Any, key: str, parts: Sequence[dict[str, Any]]) -> Any:
        values = [part[key] for part in parts]
        return None if None in values else join(values)

    joins = {"is_paused": all, "in_per_minute": sum, "out_per_minute": sum, "empty_in": max}
    jobs = [part["jobs"] for part in parts]
    due = [part for part in parts if part["oldest_due_age"] is not None]
    return {
        "name": name,
        **{key: whole(join, key, parts) for key, join in joins.items()},
        "oldest_due_age": max((part["oldest_due_age"] for part in due), default=None),
        "jobs": {status.value: whole(sum, status.value, jobs) for status in JobStatus},
    }


@click.command()
@click.option("--exact", is_flag=True, help="Count the succeeded too, however many there are.")
@click.option(
    "--queue",
    "names",
    metavar="NAME",
    multiple=True,
    shell_complete=complete_queue,
    help="Only this queue and the workers that serve it; may be repeated.",
)
@on_database_with_json
@on_nodes(_status_of_all)
def status(
    given: CliState, /, exact: bool, names: Sequence[str], as_json: bool
) -> list[dict[str, Any]]:
    """Show the number of jobs by queue and status, and the live workers.

    A job is running as soon as it is claimed.  A worker with quick jobs claims more than it has
    slots; the number of jobs claimed ahead is shown below the table.  The last columns are computed
    of the last five minutes: jobs that became due, and jobs that were claimed, a minute; and when
    no job is due if this goes on.  A queue that is named stands there also if it has no jobs.

    \b
    Example:  pgqueue --app shop.jobs:queue status
              pgqueue --app shop.jobs:queue status --queue mail --json
    """
    for name in names:
        check_queue_name(name)
    queue = given.database()
    with opened(queue) as session:
        health = queue.views.health(session)
        about = health.about_jobs()
        are_all_counted = exact or about <= COUNTED
        found_queues = queue.views.counted_queues(
            session, succeeded=are_all_counted, names=names or None
        )
        queues = [*map(_queue, found_queues.queues)]
        are_paused = found_queues.all_paused_at is not None
        live = queue.workers(session)
        if names:
            known = {one["name"]: one for one in queues}
            queues = [known.get(name, _empty(name)) for name in dict.fromkeys(names)]
            live = [one for one in live if any(serves(one.queues, name) for name in names)]
        unknown = health.unknown_tasks(queue.tasks) if queue.tasks else []
        unreadable = health.unreadable()
        paused = [task for task, _ in queue.views.paused_tasks(session, limit=MOST_PAUSED)]
    if as_json:
        tasks = [
            {"name": one.name, "due_jobs": one.jobs, "oldest_age": one.since} for one in unknown
        ]
        met = [
            {"task": one.task, "jobs": one.jobs, "oldest_age": one.since, "reason": one.reason}
            for one in unreadable
        ]
        found: dict[str, Any] = {"queues": queues, "are_all_queues_paused": are_paused}
        found |= {"paused_tasks": paused, "workers": [*map(_worker, live)]}
        found |= {"unknown_tasks": tasks, "unreadable_jobs": met, "about_jobs": about}
        print_json(found)
        return queues
    print_rows(QUEUES, queues)
    if not are_all_counted:
        click.echo(f"About {about:,} jobs in all; --exact counts those marked ?, by reading them.")
    if ahead := sum(worker.claimed_ahead for worker in live):
        click.echo(f"The running include {ahead:,} claimed ahead, which start when a slot is free.")
    if are_paused:
        click.echo("All queues are paused.")
    if paused:
        click.echo(harmless(f"Paused tasks: {', '.join(paused)}."))
    click.echo()
    print_rows(WORKERS, live, without="id")
    if live and not any(worker.is_live for worker in live):
        click.echo("No worker lives: none of these has sent a heartbeat for a minute.")
    for words in (*map(words_for_unknown, unknown), *map(words_for_unreadable, unreadable)):
        click.echo(harmless(f"\nWarning: {words}"))
    return queues


@click.command()
@on_database
def health(given: CliState) -> None:
    """Exit with 0 if a worker on this host lives, with 1 if none does.

    Any worker of this host whose last heartbeat is recent counts.

    \b
    Example:  pgqueue --app shop.jobs:queue health
    """
    host = socket.gethostname()
    queue = given.database()
    with opened(queue) as session:
        live = [
            str(worker.pid)
            for worker in queue.workers(session)
            if worker.hostname == host and worker.is_live
        ]
    if not live:
        raise click.ClickException(f"No worker lives on {host}")
    click.echo(f"Live on {host}: {', '.join(live)}")


def _list_command(
    view: View, help: str, find: Callable[..., Iterable[Any]], *options: Decorator
) -> click.Command:
    """The command that prints a list; ``find`` takes the PgQueue, a Session and the options."""
    example = f"pgqueue --app shop.jobs:queue {view.key}"

    @click.command(view.key, help=f"{help}\n\n\b\nExample:  {example}")
    @together(*options)
    @on_database_with_json
    @on_nodes()
    def command(given: CliState, /, as_json: bool, **values: Any) -> None:
        queue = given.database()
        with opened(queue) as session:
            found = find(queue, session, **values)
        print_list(view, queue, found, as_json=as_json)

    return command


workers = _list_command(
    WORKERS,
    "List the live workers with their ids, and the job that each has held longest.",
    PgQueue.workers,
)
limits = _list_command(
    LIMITS,
    "List the limits: capacities, places held, and jobs that wait.\n\n"
    "A job holds a place while it runs or is about to start.  The capacity of a rate is its "
    "starts in a period.  With a limit by argument, each value has the whole capacity; the "
    "numbers are sums over all values.  Reads all these jobs.",
    PgQueue.limits,
)
batches = _list_command(
    BATCHES,
    "List the newest batches with their progress.\n\nCounts the jobs of those that are open.",
    PgQueue.batches,
    click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True),
)
failures = _list_command(
    FAILURES,
    "List the errors of jobs, those of one kind together, the newest first.\n\n"
    "Errors are of one kind if they have the same type and were raised by the same functions of "
    "the application, in the same task.  Shows how many jobs are failed now, how many attempts "
    "have failed since the first one, the version in which the error was first seen, and one job.  "
    "The commands that select jobs take the last column as --error.",
    lambda queue, session, **words: queue.views.errors(session, **words),
    FILTERS["task"],
    click.option("--since", type=as_span, metavar="SPAN", help="Only errors since then, as 1h."),
    click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True),
)
log = _list_command(
    LOG,
    "List what operators have done by commands, in the dashboard and in Python, newest first.\n\n"
    "Shows how many jobs an action has changed, and how many it has skipped because they had moved "
    "on.  Actions are kept for 90 days.",
    lambda queue, session, **words: queue.views.log(session, **words),
    click.option("--actor", metavar="NAME", help="Only actions of this user."),
    click.option("--action", type=click.Choice(sorted(ACTIONS)), help="Only such actions."),
    click.option(
        "--before", type=as_job_id, metavar="ID", help="Only actions older than this one."
    ),
    click.option("--unfinished", is_flag=True, help="Only actions that were interrupted."),
    click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True),
)
stats = _list_command(
    STATISTICS,
    "Show how attempts have ended, and how long they have waited and run, by task.\n\n"
    "Counts the attempts of workers, ten seconds late.  p50 and p95 are the durations that half "
    "and 95 % of the attempts did not exceed; they may be wrong by a factor of two.",
    lambda queue, session, since, task: queue.views.statistics(session, since, task),
    FILTERS["task"],
    click.option(
        "--since",
        type=as_span,
        metavar="SPAN",
        default="1h",
        show_default=True,
        help=f"From when on, as 30m, 1h or {KEPT.days}d, which is the longest.",
    ),
)


COMMANDS = (status, workers, health, limits, batches, failures, stats, log)
