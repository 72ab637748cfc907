"""An application: it indexes Python files, one job per file.

The row of a file and the end of its job are one commit, so there is a row if, and only if, the
job has succeeded, whatever happens to the worker in between.
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
    """What is in one file."""

    __tablename__ = "module_stats"

    job_id: Mapped[int] = mapped_column(ForeignKey(Job.id), primary_key=True)
    path: Mapped[str]
    lines: Mapped[int]
    classes: Mapped[int]
    functions: Mapped[int]
    longest_function: Mapped[str | None]
    longest_function_lines: Mapped[int]

    job: Mapped[Job] = relationship(Job)


@queue.task(max_attempts=3, retry=Retry.exponential(base=timedelta(seconds=0.5)))
def index(session: Session, ctx: JobContext, path: str) -> None:
    """Parse one file.  Raises what a file can do wrong: syntax, encoding, or being gone."""
    with tokenize.open(path) as file:
        source = file.read()
    nodes = list(ast.walk(ast.parse(source, filename=path)))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    longest = max(functions, key=lines_of, default=None)
    session.add(
        ModuleStats(
            job_id=ctx.job_id,
            path=path,
            lines=source.count("\n"),
            classes=sum(isinstance(node, ast.ClassDef) for node in nodes),
            functions=len(functions),
            longest_function=longest.name if longest else None,
            longest_function_lines=lines_of(longest) if longest else 0,
        )
    )


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1
