"""Rows of an application that refer to jobs, in the form that the README teaches."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from pgqueue import Job, JobStatus, PgQueue

MODULE = """
{first_line}

from sqlalchemy import ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from pgqueue import Job


class Base(DeclarativeBase): ...


class Receipt(Base):
    __tablename__ = "receipts"
    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int | None] = mapped_column(ForeignKey(Job.id, ondelete="SET NULL"))
    job: Mapped[Job | None] = relationship(Job)
"""


@pytest.fixture(params=["", "from __future__ import annotations"], ids=["types", "text"])
def receipts(
    request: pytest.FixtureRequest, tmp_path: Path, engine: Engine
) -> Iterator[ModuleType]:
    path = tmp_path / "receipts_of_an_application.py"
    path.write_text(MODULE.format(first_line=request.param))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where SQLAlchemy looks the annotations up
    spec.loader.exec_module(module)
    module.Base.metadata.create_all(engine)
    yield module
    module.Base.registry.dispose()
    del sys.modules[path.stem]


def test_a_relationship_to_job_needs_no_name_of_the_registry(
    receipts: ModuleType, session: Session
) -> None:
    queue = PgQueue()

    @queue.task(name="tests.refund")
    def refund(number: int) -> None: ...

    session.add(receipts.Receipt(id=1, job=refund.job(7)))
    session.commit()

    waiting = select(receipts.Receipt.id).join(receipts.Receipt.job)
    assert session.scalars(waiting.where(Job.status == JobStatus.PENDING)).all() == [1]
    assert queue.check(session) == []
