"""What each table and each version needs in other files, so that none is forgotten."""

from pathlib import Path
from typing import cast

import sqlalchemy as sa

from pgqueue import models, tables
from pgqueue.models import Base
from pgqueue.repository.tables import deleted_records, jobs
from pgqueue.schema import SCHEMA_VERSION
from pgqueue.schema.roles import RIGHTS

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"

KEEP_THEIR_ROWS = {
    "batch_jobs",  # counted until their batch is deleted
    "error_groups",  # the job is an example
    "limit_places",  # gone before the job can be deleted
}
"""Tables with the id of a job whose rows stay when the job is deleted."""


def test_each_model_is_public() -> None:
    mapped = {model.class_.__name__ for model in Base.registry.mappers} - {"SchemaVersion"}
    assert mapped <= set(tables.__all__)
    assert mapped <= set(models.__all__)


def test_a_worker_and_a_dashboard_have_rights_on_each_table() -> None:
    rights = [RIGHTS[table.name] for table in Base.metadata.tables.values()]
    assert all(each.worker and each.dashboard for each in rights)


def test_what_is_on_record_about_a_job_is_deleted_with_it() -> None:
    gone = sa.delete(jobs).returning(jobs.c.id).cte("gone")
    statements = [cast(sa.Delete, cte.element) for cte in deleted_records(gone)]
    deleted = {cast(sa.Table, statement.table).name for statement in statements}
    with_job = {table.name for table in Base.metadata.tables.values() if "job_id" in table.c}
    assert deleted == with_job - KEEP_THEIR_ROWS
    assert all("DELETE" in RIGHTS[table].worker for table in deleted)


def test_the_changelog_has_the_version_of_the_tables() -> None:
    assert f"The tables have version {SCHEMA_VERSION}." in CHANGELOG.read_text()
