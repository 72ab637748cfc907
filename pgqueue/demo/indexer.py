"""The application of the demo: indexes Python files, one job per file.

A file's row and the end of its job are committed together.  A row exists if, and only if, its job
has succeeded, whatever happens to the worker.
"""

import ast
import os
import tokenize
from datetime import timedelta

from sqlalchemy import ForeignKey, MetaData
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from pgqueue import Job, JobContext, PgQueue, Retry

queue = PgQueue(os.environ.get("PGQUEUE_URL"))


class Base(DeclarativeBase):
    metadata = MetaData(schema="pgqueue_demo")


class ModuleStats(Base):
    """The counts of one file."""

    __tablename__ = "module_stats"

    job_id: Mapped[int] = mapped_column(ForeignKey(Job.id), primary_key=True)
    path: Mapped[str]
    lines: Mapped[int]
    classes: Mapped[int]
    functions: Mapped[int]
    longest: Mapped[str | None]
    longest_lines: Mapped[int]
    job: Mapped[Job] = relationship(Job)


@queue.task(max_attempts=3, retry=Retry.exponential(base=timedelta(seconds=0.5)))
def index(session: Session, ctx: JobContext, path: str) -> None:
    """Parse one file and store its counts.  Raises if the file is missing or cannot be parsed."""
    with tokenize.open(path) as file:
        source = file.read()
    nodes = list(ast.walk(ast.parse(source, filename=path)))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [((n.end_lineno or n.lineno) - n.lineno + 1, n.name) for n in functions]
    longest_lines, longest = max(lengths, default=(0, None))
    session.add(
        ModuleStats(
            job_id=ctx.job_id,
            path=path,
            lines=source.count("\n"),
            classes=sum(isinstance(node, ast.ClassDef) for node in nodes),
            functions=len(functions),
            longest=longest,
            longest_lines=longest_lines,
        )
    )
