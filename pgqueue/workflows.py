"""Workflows: batches whose jobs wait for each other."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, get_args

from sqlalchemy.orm import Session

from pgqueue.batches import ExtendedBatch, NewBatch, OpenBatch, check_name, in_words
from pgqueue.checks import SHORTEST_SPAN, check, checked_id, quoted, span
from pgqueue.database.callers import joined, translated_errors
from pgqueue.database.collecting import Collecting, collected, collecting_of
from pgqueue.database.flush import collect_in, is_new_job
from pgqueue.errors import OptionError, PgQueueError
from pgqueue.meta import OF_WORKFLOW, RUNS_WHEN, noted_outcomes
from pgqueue.models import Job, JobStatus
from pgqueue.repository.batches import Batches, NewBatchRow
from pgqueue.repository.enqueue import Enqueues
from pgqueue.repository.workflows import Workflows
from pgqueue.tasks import Task

When = Literal["succeeded", "failed", "cancelled", "ended"]
"""The outcome of its predecessors with which a job runs; ``"ended"``: any outcome."""

MOST_PREDECESSORS = 10_000

IDS_AT_FIRST, IDS_LATER = 20, 200
"""How many ids a block reserves at once."""

Predecessor = Job | OpenBatch | int
"""What a job can wait for: a job, its id, a group, or a batch."""


class OpenWorkflow(OpenBatch):
    """A workflow, or a group of its jobs, while jobs are added: a ``with`` block, or ``async with``
    for an AsyncSession.

    Every job that the block enqueues through the Session belongs to it.  It waits for nothing
    unless :meth:`add`, :meth:`add_many`, :meth:`after` or :meth:`group` says so.
    """

    KIND = "workflow"
    OF_KIND = OF_WORKFLOW
    _session: Session | None = None
    _before: int | None = None
    """The running job before whose successors the jobs are added."""
    _ids: deque[int]
    """Reserved ids, for new jobs."""
    _reserves: int

    def add(
        self, job: Job, *, after: Predecessor | Iterable[Predecessor] = (), when: When = "succeeded"
    ) -> Job:
        """Add a job that starts when other jobs have ended.

        The job has its id at once.  Its rows are written by the next flush of the Session, at the
        latest at the end of the block, together with those of all jobs that were added.

        Args:
            job: A new job, as ``task.job(...)`` returns it.
            after: The jobs and groups for which it waits: jobs, their ids, groups, or a list of
                these.  They must exist already, so no job can wait for itself.
            when: With which outcome of these the job runs.  Together they have failed if one of
                them has failed, else they were cancelled if one was cancelled, else they have
                succeeded.  With another outcome the job is skipped: it ends as cancelled, with the
                reason.

        Returns:
            The job, with its id.

        Raises:
            OptionError: A value is wrong.
            DuplicateJob: By the flush, if the unique key of the job is taken.

        Example:
            >>> with queue.workflow(session, "import 12") as flow:
            ...     rows = flow.add(extract.job(12))
            ...     flow.add(load.job(12), after=rows)
            ...     flow.add(clean_up.job(12), after=rows, when="failed")
        """
        session = self._open_session()
        if not is_new_job(job):
            raise OptionError(
                f"{self._where}: add is given {quoted(job)}; give a new job, as task.job(...) "
                "returns it, which is in no session"
            )
        collect_in(job, self._waiting(self._collecting_now(session), _nodes(after), when))
        job.id = self._new_id(session)
        session.add(job)
        return job

    async def add_async(
        self, job: Job, *, after: Predecessor | Iterable[Predecessor] = (), when: When = "succeeded"
    ) -> Job:
        """Add a job, as :meth:`add` does, in an ``async with`` block.

        Args:
            job: A new job, as ``task.job(...)`` returns it.
            after: The jobs and groups for which it waits, as for :meth:`add`.
            when: With which outcome of these the job runs, as for :meth:`add`.

        Returns:
            The job, with its id.

        Raises:
            OptionError, DuplicateJob: As by :meth:`add`.
        """
        return await self._actual.run_sync(lambda _: self.add(job, after=after, when=when))

    def add_many(
        self,
        task: Task[..., Any],
        rows: Iterable[Sequence[Any] | Mapping[str, Any]],
        *,
        name: str | None = None,
        after: Predecessor | Iterable[Predecessor] = (),
        when: When = "succeeded",
    ) -> "Group":
        """Add a job for each row of arguments, as one group.

        Args:
            task: The task of the jobs.
            rows: Their arguments, as for :meth:`Task.enqueue_many`.
            name: The name of the group; without it, that of the task.
            after: For what each of the jobs waits, as for :meth:`add`.
            when: With which outcome of these the jobs run, as for :meth:`add`.

        Returns:
            The group, for ``after=`` of other jobs: a job that waits for it waits for all of them.

        Raises:
            OptionError: A value is wrong.
            ArgumentsError, PayloadError: Arguments are wrong; nothing is written.

        Example:
            >>> parts = flow.add_many(transform, [(n,) for n in range(100)], after=rows)
            >>> flow.add(load.job(12), after=parts)
        """
        session = self._open_session()
        with Group(self, session, name or task.name, _nodes(after), when) as group:
            task.enqueue_many(session, rows)
        return group

    async def add_many_async(
        self,
        task: Task[..., Any],
        rows: Iterable[Sequence[Any] | Mapping[str, Any]],
        *,
        name: str | None = None,
        after: Predecessor | Iterable[Predecessor] = (),
        when: When = "succeeded",
    ) -> "Group":
        """Add a job for each row of arguments, as :meth:`add_many` does, in an ``async with``
        block.

        Args:
            task: The task of the jobs.
            rows: Their arguments.
            name: The name of the group; without it, that of the task.
            after: For what each of the jobs waits, as for :meth:`add`.
            when: With which outcome of these the jobs run, as for :meth:`add`.

        Returns:
            The group.

        Raises:
            OptionError, ArgumentsError, PayloadError: As by :meth:`add_many`.
        """
        return await self._actual.run_sync(
            lambda _: self.add_many(task, rows, name=name, after=after, when=when)
        )

    @contextmanager
    def after(self, *nodes: Predecessor, when: When = "succeeded") -> Iterator[None]:
        """Let all jobs that the block enqueues through the Session wait for other jobs.

        Args:
            nodes: The jobs and groups, as for :meth:`add`.
            when: With which outcome of these the jobs run, as for :meth:`add`.

        Raises:
            OptionError: A value is wrong.

        Example:
            >>> with flow.after(rows):
            ...     mail.enqueue(session, "ann@example.org")
            ...     session.add(audit.job(12))
        """
        session = self._open_session()
        session.flush()  # jobs that were given to session.add() before
        with collected(session, self._waiting(self._collecting_now(session), nodes, when)):
            yield
            session.flush()

    def group(
        self,
        name: str | None = None,
        *,
        after: Predecessor | Iterable[Predecessor] = (),
        when: When = "succeeded",
    ) -> "Group":
        """Return a ``with`` block whose jobs are a group: a part of the workflow for which other
        jobs can wait.  A group may have groups.

        Args:
            name: What pages and lists show of it.
            after: For what each of its jobs waits, as for :meth:`add`.
            when: With which outcome of these the jobs run, as for :meth:`add`.

        Returns:
            The group.

        Raises:
            OptionError: A value is wrong.

        Example:
            >>> with flow.group("mails", after=done) as mails:
            ...     mails.add(mail.job("ann@example.org"))
            >>> flow.add(report.job(12), after=mails)
        """
        self._open_session()
        return Group(self, self._given, name, _nodes(after), when)

    @property
    def workflow_id(self) -> int:
        """The id of the workflow, also of a group in it."""
        return self.id

    def _open_session(self) -> Session:
        if self._session is None:
            raise PgQueueError(f"{self._where}: add jobs inside of its `with` block")
        return self._session

    def _collecting_now(self, session: Session) -> Collecting:
        collecting = collecting_of(session)
        assert collecting is not None, "the block of a workflow collects its jobs"
        return collecting

    def _new_id(self, session: Session) -> int:
        """The id of a job that a later flush inserts, so that other jobs can wait for it before.

        Reserves several at once, and at first few: most workflows are small.  Ids ascend: those
        that are reserved are given up if a job was written meanwhile that has a greater one.
        """
        written = self._collecting_now(session).job_ids
        if not self._ids or (written and written[-1] > self._ids[0]):
            self._ids.clear()
            with translated_errors():
                enqueues = Enqueues(joined(session, self._where))
                self._ids.extend(enqueues.new_ids(self._reserves))
            self._reserves = IDS_LATER
        return self._ids.popleft()

    @contextmanager
    def _opened(self, session: Session) -> Iterator[None]:
        self._ids, self._reserves = deque(), IDS_AT_FIRST
        try:
            with super()._opened(session):
                self._session = session
                yield
        finally:
            self._session = None

    def _waiting(
        self, collecting: Collecting, nodes: Sequence[Predecessor], when: When
    ) -> Collecting:
        """The same block, whose jobs wait for these nodes too."""
        if when not in get_args(When):
            raise OptionError(
                f"{self._where}: when is {quoted(when)}; give one of {get_args(When)}"
            )
        after = dict.fromkeys([*collecting.after, *map(self._id_of, nodes)])
        if nodes and self._before is not None:
            raise OptionError(
                f"{self._where}: jobs that are added before the successors of job {self._before} "
                "cannot wait for others; add them in another block"
            )
        if len(after) > MOST_PREDECESSORS:
            raise OptionError(
                f"{self._where}: a job cannot wait for {len(after):,} jobs; put them into a group, "
                f"or give at most {MOST_PREDECESSORS:,}"
            )
        if not nodes and when != "succeeded":
            raise OptionError(f"{self._where}: when={when!r} is given without after")
        if not nodes:
            return collecting
        noted = noted_outcomes(OUTCOMES_OF[when])
        if collecting.after and collecting.meta.get(RUNS_WHEN) != noted.get(RUNS_WHEN):
            raise OptionError(
                f"{self._where}: the jobs of this block wait already, with another when; give the "
                "same here, or add the job outside of the block"
            )
        # With the same list of ids: the jobs belong to the same block.
        return replace(collecting, meta={**collecting.meta, **noted}, after=tuple(after))

    def _id_of(self, node: Any) -> int:
        match node:
            case OpenBatch() if node.is_open:
                raise OptionError(
                    f"{self._where}: {node.KIND} {node.id} in after= is open; a job can wait for "
                    "it when its block has ended"
                )
            case OpenBatch():
                return -node.id
            case Job(id=int(id)):
                return id
            case Job():
                raise OptionError(
                    f"{self._where}: the job of task {node.task} in after= has no id yet; flush "
                    "the session, or add it with flow.add(...)"
                )
            case _:
                if (id := checked_id(node, "job")) < 1:
                    raise OptionError(f"{self._where}: after is {id}; give the id of a job")
                return id


OUTCOMES_OF: dict[str, list[str]] = {
    "succeeded": [JobStatus.SUCCEEDED],
    "failed": [JobStatus.FAILED],
    "cancelled": [JobStatus.CANCELLED],
    "ended": [JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED],
}
"""The outcomes of its predecessors with which a job runs, by ``when``."""


def _nodes(given: Predecessor | Iterable[Predecessor]) -> Sequence[Predecessor]:
    if isinstance(given, Iterable) and not isinstance(given, Job | str | bytes):
        return tuple(given)
    single: Any = given  # checked with each of several
    return (single,)


class NewWorkflow(OpenWorkflow, NewBatch):
    """Creates the workflow."""

    def __init__(
        self, session: Any, name: str | None, *, deadline: timedelta | None, **others: Any
    ) -> None:
        super().__init__(session, name, **others)
        if deadline is not None:
            check(f"{self._where}: ", "deadline", deadline, span(SHORTEST_SPAN))
        self._deadline = deadline

    def _row(self) -> NewBatchRow:
        return super()._row()._replace(as_workflow=True, deadline=self._deadline)

    def _meta_of_callbacks(self) -> dict[str, Any]:
        # One that is not wanted is skipped then, and comes back if the workflow is opened again.
        return {self.OF_KIND: self.id}


class ExtendedWorkflow(OpenWorkflow, ExtendedBatch):
    """Adds to a workflow that exists, as from a job of it."""

    def __init__(self, session: Any, batch_id: int, *, before: int | None) -> None:
        super().__init__(session, batch_id)
        self._before = before

    def _begin(self, rows: Batches) -> int:
        workflow_id = super()._begin(rows)
        if self._before is not None and not rows.has_job(workflow_id, self._before):
            raise OptionError(
                f"{self._where}: before_successors_of is {self._before}, which is no job of this "
                "workflow; give ctx.job_id"
            )
        return workflow_id

    def _end(self, session: Session, rows: Batches, job_ids: Sequence[int]) -> None:
        if self._before is not None and job_ids:
            workflows = Workflows(joined(session, self._where))
            workflows.let_successors_wait(self.id, self._before, job_ids)


class Group(OpenWorkflow):
    """A part of a workflow, which ends with the last of its jobs."""

    KIND = "group"

    def __init__(
        self,
        whole: OpenWorkflow,
        session: Any,
        name: str | None,
        after: Sequence[Predecessor],
        when: When,
    ) -> None:
        check_name(self.KIND, name)
        super().__init__(session, in_words(self.KIND, name))
        self._whole = whole
        self._before = whole._before
        self._name = name
        self._after = after
        self._when: When = when

    @property
    def workflow_id(self) -> int:
        return self._whole.workflow_id

    def _begin(self, rows: Batches) -> int:
        workflow = self._whole.workflow_id
        return rows.add(NewBatchRow(self._name, group_of=workflow))

    def _collecting(self, session: Session) -> Collecting:
        self._outer = self._collecting_now(session)
        return self._waiting(replace(self._outer, job_ids=[]), self._after, self._when)

    def _end(self, session: Session, rows: Batches, job_ids: Sequence[int]) -> None:
        self._outer.job_ids.extend(job_ids)
        if job_ids:
            rows.watch(self.id, max(job_ids))
