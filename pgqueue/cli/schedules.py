"""``pgqueue schedules``: list the schedules, pause, resume, trigger and remove them."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import click
from sqlalchemy.orm import Session

from pgqueue.cli.app_loader import CliState, opened
from pgqueue.cli.group import on_database_with_json, together
from pgqueue.errors import OptionError, ScheduleNotFound
from pgqueue.job_queue import PgQueue
from pgqueue.repository import ScheduleState
from pgqueue.schedule_rules import LATE, Overlap
from pgqueue.terminal import harmless, print_json, print_table

RUNS = 3
DONE = {"pause": "paused", "resume": "resumed", "trigger": "triggered", "remove": "removed"}
NOT_FOUND = "not_found"


_named = together(
    click.argument("names", metavar="NAME...", nargs=-1, required=True), on_database_with_json
)


@click.group(invoke_without_command=True)
@on_database_with_json
@click.pass_context
def schedules(ctx: click.Context, given: CliState, as_json: bool) -> None:
    """Show the schedules with their next three runs, in their zone and in UTC.

    Below the table are the schedules whose tick is overdue, and why.

    \b
    Example:  pgqueue --app shop.jobs:queue schedules
              pgqueue --app shop.jobs:queue schedules trigger shop.jobs.nightly
    """
    if ctx.invoked_subcommand is None:
        _show(given.database(), as_json=as_json)


@schedules.command()
@_named
def pause(given: CliState, /, **options: Any) -> None:
    """Fire no tick of these schedules until `resume`.

    \b
    Example:  pgqueue --app shop.jobs:queue schedules pause shop.jobs.nightly
    """
    _change(given.database(), "pause", **options)


@schedules.command()
@_named
def resume(given: CliState, /, **options: Any) -> None:
    """Undo `pause`; the ticks of the pause are not made up.

    \b
    Example:  pgqueue --app shop.jobs:queue schedules resume shop.jobs.nightly
    """
    _change(given.database(), "resume", **options)


@schedules.command()
@_named
def trigger(given: CliState, /, **options: Any) -> None:
    """Enqueue a job of each schedule now; their next ticks stay where they are.

    Needs the app, whose tasks encode the arguments.

    \b
    Example:  pgqueue --app shop.jobs:queue schedules trigger shop.jobs.nightly
    """
    _change(given.application(), "trigger", **options)


@schedules.command()
@_named
def remove(given: CliState, /, **options: Any) -> None:
    """Delete schedules; their jobs stay.

    A schedule that the code declares is added again when the next worker starts.

    \b
    Example:  pgqueue --app shop.jobs:queue schedules remove report:7
    """
    _change(given.database(), "remove", **options)


def _show(queue: PgQueue, *, as_json: bool) -> None:
    with opened(queue) as session:
        found = queue.schedules.list(session)
    if as_json:
        print_json({"schedules": [_document(queue, one) for one in found]})
        return
    rows = [row for one in found for row in _rows(one)]
    columns = ["schedule", "task", "rule", "next runs", "in UTC", ""]
    print_table(columns, rows, otherwise="No schedules.")
    for one in found:
        if words := words_for_overdue(queue, one):
            click.echo(harmless(f"\nWarning: {words}"))


def _change(queue: PgQueue, verb: str, *, names: tuple[str, ...], as_json: bool) -> None:
    """Change each schedule in a separate transaction; exit with 1 if one does not exist."""
    changed: list[dict[str, Any]] = []
    for name in dict.fromkeys(names):
        with opened(queue) as session:
            reason = _why_not_for_good(queue, session, name) if verb == "remove" else None
            try:
                job_id = getattr(queue.schedules, verb)(session, name)
            except ScheduleNotFound as error:
                changed.append({"name": name, "change": NOT_FOUND, "reason": str(error)})
                continue
            session.commit()
        changed.append({"name": name, "change": DONE[verb]})
        if job_id is not None:
            changed[-1]["job_id"] = job_id
        if reason is not None:
            changed[-1]["reason"] = reason
    if as_json:
        print_json({"schedules": changed})
    else:
        for one in changed:
            click.echo(harmless(_line(one)), err=one["change"] == NOT_FOUND)
    if any(one["change"] == NOT_FOUND for one in changed):
        click.get_current_context().exit(1)


def words_for_overdue(queue: PgQueue, state: ScheduleState) -> str | None:
    """Say why a tick that is more than a minute late has not been fired; None if none is late."""
    is_late = state.next_at is not None and state.read_at - state.next_at > LATE
    if state.paused_at is not None or not is_late:
        return None
    what = f"schedule {state.name}: its tick of {state.next_at} has not been fired"
    try:
        state.rule  # noqa: B018  # raises if this system cannot read it
    except OptionError as error:
        return f"{what}: {error}; change the rule, or run workers on a system that can read it"
    if queue.tasks and state.task not in queue.tasks:
        return (
            f"{what}: this app knows no task {state.task}; run a worker that does, or "
            f"pgqueue schedules remove {state.name}"
        )
    if state.overlap == Overlap.WAIT and state.last_job_id is not None:
        return f"{what}: it waits for job {state.last_job_id}, unless that has ended"
    return f"{what}: no worker runs that knows task {state.task}, or its log says why it cannot"


def _line(one: dict[str, Any]) -> str:
    if one["change"] == NOT_FOUND:
        return str(one["reason"])
    job = f", job {one['job_id']}" if "job_id" in one else ""
    reason = f"; {one['reason']}" if "reason" in one else ""
    return f"{one['name']}: {one['change']}{job}{reason}"


def _why_not_for_good(queue: PgQueue, session: Session, name: str) -> str | None:
    """Say that a schedule of the code comes back after its removal."""
    modules = {one.name: one.declared_in for one in queue.schedules.list(session)}
    if modules.get(name) is None:
        return None
    return (
        f"module {modules[name]} declares it, so the next worker that starts adds it again; "
        "pause it"
    )


def _next_runs(state: ScheduleState) -> list[datetime]:
    """None where this system cannot read the rule: the line below the table says so."""
    try:
        return state.next_runs(RUNS)
    except OptionError:
        return []


def _rows(state: ScheduleState) -> Iterator[Sequence[str]]:
    runs = _next_runs(state)
    first = (state.name, state.task, _rule(state))
    note = "paused" if state.paused_at else "" if runs else "no next run"
    if not runs:
        yield (*first, "", "", note)
    for number, run in enumerate(runs):
        named = first if number == 0 else ("", "", "")
        local = _in_zone(run, state).strftime("%a %Y-%m-%d %H:%M:%S %z")
        yield (*named, local, run.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S"), "")


def _rule(state: ScheduleState) -> str:
    return f"every {state.every}" if state.cron is None else f"{state.cron} {state.timezone}"


def _in_zone(run: datetime, state: ScheduleState) -> datetime:
    return run.astimezone(ZoneInfo(state.timezone))


def _document(queue: PgQueue, state: ScheduleState) -> dict[str, Any]:
    return {
        "name": state.name,
        "task": state.task,
        "cron": state.cron,
        "every": state.every,
        "timezone": state.timezone,
        "catch_up": state.catch_up,
        "overlap": state.overlap,
        "declared_in": state.declared_in,
        "is_paused": state.paused_at is not None,
        "last_tick_at": state.last_tick_at,
        "last_job_id": state.last_job_id,
        "next_runs": [
            {"local": _in_zone(run, state).isoformat(), "utc": run.isoformat()}
            for run in _next_runs(state)
        ],
        "overdue": words_for_overdue(queue, state),
    }
