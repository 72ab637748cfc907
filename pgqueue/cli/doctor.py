"""``pgqueue doctor``: finds jobs that do not run and broken rows, and names the remedies."""

from collections.abc import Iterator, Mapping, Sequence

import click
from sqlalchemy.orm import Session

from pgqueue import Violation, schema
from pgqueue.cli.app_loader import CliState
from pgqueue.cli.nodes import on_nodes
from pgqueue.cli.options import on_database_with_json
from pgqueue.errors import SchemaError
from pgqueue.job_queue import PgQueue
from pgqueue.models import SCHEMA
from pgqueue.nodes import Node
from pgqueue.redaction import redacted
from pgqueue.schema.comparison import differences
from pgqueue.terminal import harmless, print_json
from pgqueue.views.findings import (
    SHOWN,
    Finding,
    Level,
    of_jobs,
    of_nodes,
    of_row_security,
    of_server,
    of_settings,
    of_tables,
)


def _doctor_of_all(found: Mapping[Node, None], as_json: bool) -> None:
    _end(list(of_nodes(found)), as_json=as_json, is_of_one=False)


@click.command()
@on_database_with_json
@on_nodes(_doctor_of_all)
def doctor(given: CliState, /, as_json: bool) -> None:
    """Look for problems: the tables' version, broken rows, settings that lose commits.

    Changes nothing, reads all jobs, and exits with 1 if something is wrong.  With --nodes, also
    compares the nodes.

    \b
    Example:  pgqueue --url postgresql://me@localhost/shop doctor
    """
    queue = given.database()
    with queue.session() as session:
        findings = [
            *_of_rows(queue, session),
            *of_settings(queue.views.health(session)),
            *of_server(queue, queue.views.health(session)),
        ]
    _end(findings, as_json=as_json)


def _end(findings: Sequence[Finding], *, as_json: bool, is_of_one: bool = True) -> None:
    """Print the findings, and exit with 1 if one is wrong."""
    is_sound = all(finding.level is not Level.WRONG for finding in findings)
    if as_json:
        print_json({**({"is_sound": is_sound} if is_of_one else {}), "findings": findings})
    else:
        for finding in findings:
            line = f"{finding.level:7}  {finding.subject}: {finding.detail}"
            click.echo(harmless(redacted(line)))
    if not is_sound:
        click.get_current_context().exit(1)


def _of_rows(queue: PgQueue, session: Session) -> Iterator[Finding]:
    """What the tables tell; nothing more if they cannot be read."""
    yield from of_row_security(session)
    try:
        schema.verify(session.connection())
    except SchemaError as error:
        yield Finding(Level.WRONG, "schema", str(error))
        return
    yield Finding(Level.OK, "schema", f"{SCHEMA}, version {schema.SCHEMA_VERSION}")
    if found := differences(session.connection()):
        yield from (Finding(Level.WRONG, "tables", each) for each in found)
        return
    violations = queue.check(session)
    for violation in violations[:SHOWN]:
        steps = "; ".join(remedy_for(violation))
        yield Finding(Level.WRONG, "invariant", f"{violation}; to mend it run {steps}")
    if len(violations) > SHOWN:
        yield Finding(Level.WRONG, "invariants", f"{len(violations) - SHOWN} more are broken")
    if not violations:
        yield Finding(Level.OK, "invariants", "no row breaks one")
    yield from of_jobs(queue, session)
    health = queue.views.health(session)
    yield from of_tables(health.tables())
    for table in health.tables_without_autovacuum():
        yield Finding(
            Level.WARNING,
            "autovacuum",
            f"off for {SCHEMA}.{table}: its dead rows stay, and claims become slow; "
            f"ALTER TABLE {SCHEMA}.{table} RESET (autovacuum_enabled)",
        )


def remedy_for(violation: Violation) -> tuple[str, ...]:
    """The commands and the SQL that repair the row, in the order to run them."""
    return tuple(
        step.format(id=violation.job_id, schema=f'"{SCHEMA}"') for step in REMEDIES[violation.rule]
    )


_CANCEL = "pgqueue cancel {id}"
_REQUEUE = "pgqueue requeue {id}"
_NO_MESSAGE = "DELETE FROM {schema}.message_queue WHERE target_id = {id}"
_NOT_WAITING = "DELETE FROM {schema}.waiting_messages WHERE target_id = {id}"
_NO_LETTER = "DELETE FROM {schema}.dead_letters WHERE job_id = {id}"

REMEDIES: dict[str, tuple[str, ...]] = {
    "an unfinished job has a message or a lease": (_CANCEL, _REQUEUE),
    "attempts never exceed max_attempts": (
        "UPDATE {schema}.jobs SET attempts = max_attempts WHERE id = {id}",
    ),
    "a message has a job": (_NO_MESSAGE,),
    "a job has at most one message": (_NO_MESSAGE, _CANCEL, _REQUEUE),
    "a message stands where its job says": (_NO_MESSAGE, _CANCEL, _REQUEUE),
    "a message beside a lease is the one the lease holds": (_NO_MESSAGE,),
    "a lease has a job": ("DELETE FROM {schema}.leases WHERE target_id = {id}",),
    # Every worker looks for them twice a second.
    "a lease has an owner that lives, or is rescued within a minute": ("pgqueue worker",),
    "a dead letter says what its job says": (_NO_LETTER,),
    "a failed or cancelled job has a dead letter": (
        _NO_LETTER,
        "INSERT INTO {schema}.dead_letters (job_id, outcome, queue, task, finished_at) "
        "SELECT id, outcome, queue, task, finished_at FROM {schema}.jobs WHERE id = {id}",
    ),
    "a waiting message has an unfinished job": (_NOT_WAITING,),
    "a waiting message stands where its job says": (_NOT_WAITING, _CANCEL, _REQUEUE),
    "a waiting job has neither message nor lease": (_NOT_WAITING,),
    "an admitted job has a place in each of its limits": (
        "INSERT INTO {schema}.limit_places (limit_key, job_id) SELECT limit_key, id "
        "FROM {schema}.jobs, unnest(string_to_array(limit_keys, chr(10))) AS limit_key "
        "WHERE id = {id} AND NOT EXISTS (SELECT FROM {schema}.limit_places AS place "
        "WHERE place.limit_key = limit_key.limit_key AND job_id = id)",
    ),
    "a job of a batch has its batch": (
        "DELETE FROM {schema}.batch_jobs WHERE job_id = {id} AND NOT EXISTS "
        "(SELECT FROM {schema}.batches WHERE id = batch_id)",
    ),
    "no job is added to a batch after its end": (
        "DELETE FROM {schema}.batch_jobs USING {schema}.batches "
        "WHERE id = batch_id AND job_id = {id} AND ended_at IS NOT NULL",
    ),
    # A worker looks at it then.
    "a batch is blocked until it ends": (
        "DELETE FROM {schema}.blocked USING {schema}.batch_jobs "
        "WHERE node_id = -batch_id AND job_id = {id}",
        "INSERT INTO {schema}.blocked (node_id, waits_for) SELECT -batch_id, job_id "
        "FROM {schema}.batch_jobs JOIN {schema}.batches ON id = batch_id "
        "WHERE job_id = {id} AND ended_at IS NULL",
    ),
    "a blocked job has neither message nor lease": (
        "DELETE FROM {schema}.blocked WHERE node_id = {id}",
    ),
    # Every worker looks for them twice a second.
    "a blocked node watches something unfinished, or is looked at within a minute": (
        "pgqueue worker",
    ),
    "an ended job holds no unique key": (
        "UPDATE {schema}.jobs SET held_unique_key = NULL WHERE id = {id}",
    ),
    "a succeeded job was attempted": ("UPDATE {schema}.jobs SET attempts = 1 WHERE id = {id}",),
}
"""By the text of the rule.  If a job breaks several rules, apply them in the order of the check."""


COMMANDS = (doctor,)
