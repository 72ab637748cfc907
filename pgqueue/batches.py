"""Batches: jobs that are one thing, whose end starts one more job."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from sqlalchemy.orm import Session

from pgqueue.checks import shown
from pgqueue.database import async_sessions
from pgqueue.database.autocommit import refuse_autocommit
from pgqueue.database.callers import joined, sync_session, translated_errors
from pgqueue.database.collecting import Collecting, collected
from pgqueue.errors import ArgumentsError, OptionError, PgQueueError
from pgqueue.meta import OF_BATCH, checked_meta, meta_text, noted_outcomes
from pgqueue.models import JobStatus
from pgqueue.repository.batches import Batches, NewBatchRow
from pgqueue.tasks import Task

LONGEST_NAME = 200
OUTCOMES = {
    "on_success": JobStatus.SUCCEEDED,
    "on_failure": JobStatus.FAILED,
    "on_cancelled": JobStatus.CANCELLED,
}
"""The outcome of a batch with which each of its callbacks runs."""


def in_words(kind: str, name: Any) -> str:
    """A batch with this name, for errors."""
    return f"{kind} {shown(name)}" if name else kind


def check_name(kind: str, name: Any) -> None:
    """Raise OptionError if a batch cannot have this name."""
    if name is not None and not (
        isinstance(name, str) and name.isprintable() and 0 < len(name) <= LONGEST_NAME
    ):
        raise OptionError(
            f"{kind}: name is {shown(name)}; give at most {LONGEST_NAME} printable characters"
        )


class OpenBatch(ABC):
    """A batch while jobs are added to it: a ``with`` block, or ``async with`` for an AsyncSession.

    Every job that the block enqueues through the Session belongs to the batch, also a job that
    held the unique key of an enqueue.  All is written in the transaction of the Session, which
    must not end inside of the block; nothing is committed.
    """

    KIND = "batch"
    OF_KIND = OF_BATCH
    """The key, in the meta of each of its jobs, of its id."""
    is_open: bool = False
    """Whether its block is running."""

    def __init__(self, session: Any, where: str) -> None:
        self._given = session
        self._where = where
        self._id: int | None = None

    @property
    def id(self) -> int:
        """The id of the batch.  Raises PgQueueError before the block."""
        if self._id is None:
            raise PgQueueError(f"{self._where} has no id yet; open it with a `with` block")
        return self._id

    def __enter__(self) -> Self:
        self._block = self._opened(sync_session(self._given, self._where))
        self._block.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._block.__exit__(kind, error, trace)

    async def __aenter__(self) -> Self:
        def enter(session: Session) -> None:
            self._block = self._opened(session)
            self._block.__enter__()

        self._actual = async_sessions.actual(self._given, self._where)
        await self._actual.run_sync(enter)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._actual.run_sync(lambda _: self._block.__exit__(kind, error, trace))

    @abstractmethod
    def _begin(self, rows: Batches) -> int:
        """Create the batch, or keep it open; returns its id."""

    @abstractmethod
    def _end(self, session: Session, rows: Batches, job_ids: Sequence[int]) -> None:
        """Write what is left, after the jobs."""

    def _collecting(self, session: Session) -> Collecting:
        """What the jobs of the block are given."""
        return Collecting({self.OF_KIND: self.id})

    @contextmanager
    def _opened(self, session: Session) -> Iterator[None]:
        connection = joined(session, self._where)
        refuse_autocommit(connection, self._where, instead=f"a {self.KIND} needs a transaction")
        with translated_errors():
            self._id = self._begin(Batches(connection))
        transaction = session.get_transaction()
        collecting = self._collecting(session)
        self.is_open = True
        with collected(session, collecting):
            yield
            if session.get_transaction() is not transaction:
                raise PgQueueError(
                    f"{self._where}: the transaction has ended inside of the `with` block; jobs "
                    f"that it has committed run, but are not in {self.KIND} {self._id}, which does "
                    "not wait for them; commit after the block"
                )
            session.flush()  # jobs that were given to session.add()
        self.is_open = False
        with translated_errors():
            rows = Batches(joined(session, self._where))
            rows.add_jobs(self.id, collecting.job_ids)
            self._end(session, rows, collecting.job_ids)


class NewBatch(OpenBatch):
    """Creates the batch.  The callbacks are written last: a batch whose block has failed, and whose
    transaction is committed all the same, has none."""

    def __init__(
        self,
        session: Any,
        name: str | None,
        *,
        meta: Mapping[str, Any] | None,
        callbacks: Mapping[str, Task[..., Any]],
        application: str,
    ) -> None:
        super().__init__(session, in_words(self.KIND, name))
        check_name(self.KIND, name)
        self._name = name
        self._application = application
        where = f"{self._where}: "
        self._meta = meta_text(where, checked_meta(where, meta)) if meta else None
        self._tasks = callbacks

    def _begin(self, rows: Batches) -> int:
        batch_id = rows.add(self._row())
        for parameter, task in self._tasks.items():
            try:
                task.check_callback(batch_id)
            except ArgumentsError as error:
                raise ArgumentsError(
                    f"{self._where}: {parameter} gets the id of the {self.KIND}, an int, as its "
                    f"one argument: {error}"
                ) from error
        return batch_id

    def _end(self, session: Session, rows: Batches, job_ids: Sequence[int]) -> None:
        if job_ids:
            rows.watch(self.id, max(job_ids))
        for parameter, task in self._tasks.items():
            when = [OUTCOMES[parameter]]
            if parameter == "on_failure" and "on_cancelled" not in self._tasks:
                when.append(OUTCOMES["on_cancelled"])
            meta = {**self._meta_of_callbacks(), **noted_outcomes(when)}
            with collected(session, Collecting(meta, after=(-self.id,))):
                task.enqueue(session, self.id)

    def _row(self) -> NewBatchRow:
        return NewBatchRow(self._name, self._meta, self._application)

    def _meta_of_callbacks(self) -> dict[str, Any]:
        return {}


class ExtendedBatch(OpenBatch):
    """Adds to a batch that exists, and keeps it from ending until the transaction does."""

    def __init__(self, session: Any, batch_id: int) -> None:
        super().__init__(session, f"{self.KIND} {batch_id}")
        self._batch_id = batch_id

    def _begin(self, rows: Batches) -> int:
        rows.keep_open(self._batch_id, is_workflow=self.OF_KIND != OF_BATCH)
        return self._batch_id

    def _end(self, session: Session, rows: Batches, job_ids: Sequence[int]) -> None:
        """Nothing is left: the batch watches an older job, and the callbacks are its own."""
