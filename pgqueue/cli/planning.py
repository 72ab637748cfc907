"""``pgqueue change --dry-run``: what would change of which jobs."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
from sqlalchemy.orm import Session

from pgqueue.cli.app_loader import opened
from pgqueue.cli.changing import Result, changing, result_of_error, selected
from pgqueue.cli.jobs import as_data
from pgqueue.errors import PgQueueError
from pgqueue.job_queue import PgQueue
from pgqueue.redaction import redacted_data, secrets_among
from pgqueue.repository import Change, Jobs, Listing
from pgqueue.tasks.editing import Changes
from pgqueue.terminal import harmless

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """The result to expect for one job, and its values that would change."""

    result: Result
    before: Values = field(default_factory=dict)
    after: Values = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.after:
            return str(self.result)
        return f"{self.result.id}: {', '.join(_differences(self.before, self.after))}"

    def as_data(self) -> dict[str, Any]:
        return {**self.result.as_data(), "before": self.before, "after": self.after}


def show_plan(
    queue: PgQueue, changes: Changes, /, *, as_json: bool, job_ids: tuple[int, ...], **which: Any
) -> None:
    """Decide as a change does, with the same checks; locks and writes nothing."""
    with opened(queue) as session:
        plans = [
            _planned(queue, session, changes, job_id)
            for job_id in selected(session, changing(changes), job_ids=job_ids, **which)
        ]
    if as_json:
        counts = Counter(plan.result.change for plan in plans)
        click.echo(
            json.dumps({"jobs": [plan.as_data() for plan in plans], "counts": counts}, indent=2)
        )
    elif not plans:
        click.echo("No job fits.")
    else:
        for plan in plans:
            click.echo(harmless(str(plan)), err=plan.result.is_missed)
    if any(plan.result.is_missed for plan in plans):
        click.get_current_context().exit(1)


def _planned(queue: PgQueue, session: Session, changes: Changes, job_id: int) -> Plan:
    try:
        job = Jobs(session).values(job_id, with_args=changes.has_args)
        new = changes.of(job, queue.find) if job.is_waiting else {}
    except PgQueueError as error:
        return Plan(result_of_error(job_id, error))
    if not job.is_waiting:
        status = Listing(session).status(job_id)
        return Plan(Result(job_id, Change.UNCHANGED.name.lower(), f"its status is {status}"))
    if not new:
        return Plan(Result(job_id, Change.UNCHANGED.name.lower(), "it has these values already"))
    old = {name: getattr(job, name) for name in new}
    if "args" in new:
        old["args"], new["args"] = _different(job.args, new["args"])
    task = queue.tasks.get(job.task)
    hidden = () if task is None else task.settings.secret_args
    return Plan(
        Result(job_id, Change.CHANGED.name.lower()), _shown(old, hidden), _shown(new, hidden)
    )


def _different(old: Any, new: Values) -> tuple[Values, Values]:
    """Of some arguments before and after, those that are not the same."""
    before: Values = old if isinstance(old, dict) else {}
    names = [name for name in {**before, **new} if before.get(name) != new.get(name)]
    return _chosen(before, names), _chosen(new, names)


def _chosen(values: Values, names: Sequence[str]) -> Values:
    return {name: values[name] for name in names if name in values}


def _shown(values: Values, hidden: Sequence[str]) -> dict[str, Any]:
    """Values as JSON data, without secrets."""
    secrets = secrets_among(values.get("args", {}), hidden)
    return {
        name: as_data(redacted_data(value, names=hidden if name == "args" else (), secrets=secrets))
        for name, value in values.items()
    }


def _differences(before: Values, after: Values, where: str = "") -> Iterator[str]:
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if name == "args" and not where:
            yield from _differences(before[name], after[name], "args.")
        else:
            yield f"{where}{name} {json.dumps(old)} -> {json.dumps(new)}"
