"""``pgqueue doctor``: what is wrong with a database, and what to do about it."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum

import click
from sqlalchemy import text
from sqlalchemy.orm import Session

from pgqueue import schema
from pgqueue.errors import SchemaError
from pgqueue.job_queue import PgQueue
from pgqueue.models import SCHEMA

SHOWN = 20
"""Broken rows to name one by one."""

DURABILITY = {
    "fsync": "a crash of the server can destroy the whole database",
    "full_page_writes": "a crash of the server can leave torn pages behind",
    "synchronous_commit": "a crash of the server loses jobs whose commit was acknowledged",
}


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing the doctor has looked at."""

    level: Level
    subject: str
    detail: str


def examine(queue: PgQueue, *, as_json: bool) -> None:
    """Say what was found; exit with 1 when something is wrong."""
    with queue.session() as session:
        findings = [*_schema(queue, session), *_settings(session)]
    is_sound = all(finding.level is not Level.WRONG for finding in findings)
    if as_json:
        found = {"is_sound": is_sound, "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(found, indent=2))
    else:
        for finding in findings:
            click.echo(f"{finding.level:5}  {finding.subject}: {finding.detail}")
    if not is_sound:
        click.get_current_context().exit(1)


def _schema(queue: PgQueue, session: Session) -> Iterator[Finding]:
    try:
        schema.verify(session.connection())
    except SchemaError as error:
        yield Finding(Level.WRONG, "schema", str(error))
        return
    yield Finding(Level.OK, "schema", f"{SCHEMA}, version {schema.SCHEMA_VERSION}")
    violations = queue.check(session)
    for violation in violations[:SHOWN]:
        yield Finding(Level.WRONG, "invariant", str(violation))
    if len(violations) > SHOWN:
        yield Finding(Level.WRONG, "invariants", f"{len(violations) - SHOWN} more are broken")
    if not violations:
        yield Finding(Level.OK, "invariants", "no row breaks one")


def _settings(session: Session) -> Iterator[Finding]:
    for name, danger in DURABILITY.items():
        value = session.scalar(text("SELECT current_setting(:name)"), {"name": name})
        if value == "off":
            yield Finding(Level.WRONG, name, f"off: {danger}; set it to on")
        else:
            yield Finding(Level.OK, name, str(value))
    isolation = session.scalar(text("SELECT current_setting('default_transaction_isolation')"))
    if isolation != "read committed":
        yield Finding(
            Level.NOTE,
            "default_transaction_isolation",
            f"{isolation}; workers use read committed whatever it says, your enqueuing "
            "transactions do not, and have to be ready for serialization failures",
        )
