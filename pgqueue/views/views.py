"""``Views``: what an application, a command or a page reads."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from pgqueue.database.callers import AnySession, executor
from pgqueue.errors import OptionError
from pgqueue.models import JobStatus
from pgqueue.operations import Operations, Selection
from pgqueue.repository.batches import Batches, BatchState
from pgqueue.repository.error_groups import Deployed, ErrorGroups, Failures
from pgqueue.repository.failures import FailedGroup, FailedGroups
from pgqueue.repository.health import Health
from pgqueue.repository.listing import JobDetails, Listing
from pgqueue.repository.operator_actions import LogEntry, OperatorActions
from pgqueue.repository.pages import JobPage, Pages, PageStart
from pgqueue.repository.pauses import Pauses
from pgqueue.repository.prune import DueJobs, Pruning
from pgqueue.repository.queue_minutes import DepthPoint, LastCount, QueueMinutes
from pgqueue.repository.schedules import ScheduleRows
from pgqueue.repository.task_minutes import AttemptPoint, TaskMinutes, TaskStatistics
from pgqueue.repository.workers import WorkerState
from pgqueue.repository.workflow_members import FirstFailure, WorkflowMembers
from pgqueue.views.graph import Graph, read_graph
from pgqueue.views.limits import LimitView, read_limits
from pgqueue.views.queues import QueueViews, read_queues
from pgqueue.views.schedules import ScheduleView
from pgqueue.views.tasks import TaskView, read_tasks

EVERY_JOB = Selection()


class Views:
    """Reads jobs, queues, limits, schedules, workers and statistics; changes nothing.

    :attr:`PgQueue.views` is one.  Each method reads in the caller's Session or Connection.
    Arguments, results and errors are returned as they are stored: what is secret of them, the
    caller must hide.

    Example:
        >>> with queue.session() as session:
        ...     for one in queue.views.queues(session).queues:
        ...         print(one.name, one.count.due, one.empty_in)
    """

    def __init__(self, queue: Operations) -> None:
        self._queue = queue

    # Jobs

    def jobs(
        self,
        session: AnySession,
        jobs: Selection = EVERY_JOB,
        *,
        limit: int = 20,
        start: PageStart | None = None,
        patience: timedelta | None = None,
    ) -> JobPage:
        """Return a page of jobs: the newest first, pending ones in the order of their starts.

        Args:
            session: A Session or Connection to read with.
            jobs: Which jobs.
            limit: How many.
            start: ``next_start`` of the page before, or an id; None for the first page.
            patience: How long is searched, where no index finds the jobs; the page says how far the
                search has come.

        Returns:
            The page.

        Raises:
            OptionError: The selection has ids.
        """
        if jobs.ids is not None:
            raise OptionError(
                "views.jobs: it lists jobs by conditions; use views.job(id) for an id"
            )
        pages = Pages(executor(session), patience=patience)
        return pages.page(jobs.which, limit=limit, start=start)

    def job(self, session: AnySession, job_id: int) -> JobDetails:
        """Return everything about a job.

        Args:
            session: A Session or Connection to read with.
            job_id: The id of the job.

        Returns:
            Its row, its attempts, what it waits for, and who acted on it.

        Raises:
            JobNotFound: There is no such job.
        """
        return Listing(executor(session)).job(job_id)

    def status(self, session: AnySession, job_id: int) -> JobStatus | None:
        """Return the status of a job.

        Args:
            session: A Session or Connection to read with.
            job_id: The id of the job.

        Returns:
            The status; None if there is no job with this id.
        """
        return Listing(executor(session)).status(job_id)

    def arguments(self, session: AnySession, job_ids: Iterable[int]) -> dict[int, Any]:
        """Return the arguments of some jobs.

        Args:
            session: A Session or Connection to read with.
            job_ids: The ids of the jobs.

        Returns:
            The arguments by id; empty if the role may not read them.
        """
        return Listing(executor(session)).arguments(job_ids)

    def holders(self, session: AnySession, job_ids: Iterable[int]) -> dict[int, str]:
        """Return the workers that have claimed some jobs.

        Args:
            session: A Session or Connection to read with.
            job_ids: The ids of the jobs.

        Returns:
            The workers by the ids of the jobs, as ``host:pid``.
        """
        return Listing(executor(session)).holders(job_ids)

    # Queues, limits, tasks

    def queues(self, session: AnySession, names: Collection[str] | None = None) -> QueueViews:
        """Return the queues, with the last counts of a worker; counts no jobs.

        Args:
            session: A Session or Connection to read with.
            names: Only these queues.

        Returns:
            The queues.
        """
        return read_queues(self._queue, executor(session), names)

    def counted_queues(
        self,
        session: AnySession,
        *,
        succeeded: bool = True,
        names: Collection[str] | None = None,
    ) -> QueueViews:
        """Return the queues with their jobs counted now.

        Args:
            session: A Session or Connection to read with.
            succeeded: Whether the succeeded jobs are counted too, which reads all jobs.
            names: Only these queues, if they have or lately had jobs.

        Returns:
            The queues.
        """
        found = read_queues(self._queue, executor(session), names)
        return found.counted_now(executor(session), succeeded=succeeded)

    def last_count(self, session: AnySession) -> LastCount | None:
        """Return the last count of a worker.

        Args:
            session: A Session or Connection to read with.

        Returns:
            The time and the numbers; None if no worker has counted.
        """
        return QueueMinutes(executor(session)).latest()

    def depths(
        self,
        session: AnySession,
        since: timedelta,
        size: timedelta,
        names: Collection[str] | None = None,
    ) -> list[DepthPoint]:
        """Return how many jobs waited, over time.

        Args:
            session: A Session or Connection to read with.
            since: How far back.
            size: The time between two points.
            names: Only these queues, or None for all.

        Returns:
            The points, the oldest first.
        """
        return QueueMinutes(executor(session)).series(since, size, names)

    def limits(self, session: AnySession) -> list[LimitView]:
        """Return the limits with the jobs that hold places; counts waiting jobs up to a bound.

        Args:
            session: A Session or Connection to read with.

        Returns:
            The limits by name.
        """
        return read_limits(self._queue, executor(session))

    def tasks(
        self, session: AnySession, since: timedelta, name: str | None = None
    ) -> list[TaskView]:
        """Return the tasks that ran, are paused, or are of the application.

        Args:
            session: A Session or Connection to read with.
            since: How far back attempts are counted.
            name: Only this task.

        Returns:
            The tasks, the busiest first.
        """
        return read_tasks(self._queue, executor(session), since, name)

    def paused_tasks(self, session: AnySession, *, limit: int) -> Sequence[tuple[str, datetime]]:
        """Return the paused tasks.

        Args:
            session: A Session or Connection to read with.
            limit: How many at most.

        Returns:
            The names, each with the time of the pause.
        """
        return [*Pauses(executor(session)).tasks(limit=limit).items()]

    def statistics(
        self, session: AnySession, since: timedelta, task: str | None = None
    ) -> list[TaskStatistics]:
        """Return how the attempts of tasks have ended, and how long they waited and ran.

        Args:
            session: A Session or Connection to read with.
            since: How far back.
            task: Only this task.

        Returns:
            The numbers by task.
        """
        return TaskMinutes(executor(session)).since(since, task)

    def attempts(
        self, session: AnySession, since: timedelta, size: timedelta, task: str | None = None
    ) -> list[AttemptPoint]:
        """Return how many attempts have ended, over time.

        Args:
            session: A Session or Connection to read with.
            since: How far back.
            size: The time between two points.
            task: Only this task.

        Returns:
            The points, the oldest first.
        """
        return TaskMinutes(executor(session)).series(since, size, task)

    # Schedules, batches, workers

    def schedules(
        self, session: AnySession, *, runs: int = 3, results: bool = True
    ) -> list[ScheduleView]:
        """Return the schedules with their next runs, and the results of their last jobs.

        Also those that the code declares and no worker has written so far.

        Args:
            session: A Session or Connection to read with.
            runs: How many next runs of each.
            results: Whether the results of the last jobs are read too.

        Returns:
            The schedules by name.
        """
        connection, schedules = executor(session), self._queue.schedules
        rows = ScheduleRows(connection)
        ended = rows.results() if results else {}
        found = [
            ScheduleView.of(state, runs, ended.get(state.name, [])[::-1]) for state in rows.all()
        ]
        unwritten = schedules.unwritten({view.state.name for view in found}, rows.now())
        new = [ScheduleView.of(state, runs, is_written=False) for state in unwritten]
        return sorted([*found, *new], key=lambda view: view.state.name)

    def paused_schedules(
        self, session: AnySession, *, limit: int
    ) -> Sequence[tuple[str, datetime]]:
        """Return the paused schedules.

        Args:
            session: A Session or Connection to read with.
            limit: How many at most.

        Returns:
            The names, each with the time of the pause.
        """
        return [*Pauses(executor(session)).schedules(limit=limit).items()]

    def batches(self, session: AnySession, *, limit: int) -> list[BatchState]:
        """Return the newest batches, as a worker has counted them last.

        Args:
            session: A Session or Connection to read with.
            limit: How many at most.

        Returns:
            The batches, the newest first.
        """
        return Batches(executor(session)).newest(limit)

    def graph(self, session: AnySession, workflow_id: int) -> Graph | None:
        """Return the graph of a workflow, like jobs as one box.

        Args:
            session: A Session or Connection to read with.
            workflow_id: The id of the workflow.

        Returns:
            The graph; None of a batch that is no workflow, and of a workflow with more than 20,000
            jobs.
        """
        return read_graph(executor(session), workflow_id)

    def first_failure(self, session: AnySession, batch_id: int) -> FirstFailure | None:
        """Return the job of a batch or workflow that has failed first.

        Args:
            session: A Session or Connection to read with.
            batch_id: The id of the batch or workflow.

        Returns:
            The job, with the number of jobs that were skipped after it, which its requeue brings
            back; None if none has failed.
        """
        return WorkflowMembers(executor(session)).first_failure(batch_id)

    def prunable(self, session: AnySession) -> list[DueJobs]:
        """Return how many ended jobs the workers of the application will delete.

        Args:
            session: A Session or Connection to read with.

        Returns:
            The numbers by task.
        """
        pruning = Pruning(executor(session))
        return pruning.due(self._queue.retention, pruning.references())

    def workers(self, session: AnySession) -> list[WorkerState]:
        """Return the live workers, each with the jobs that it holds.

        Args:
            session: A Session or Connection to read with.

        Returns:
            The workers, in the order of their starts.
        """
        return self._queue.workers(session)

    # Errors

    def errors(
        self,
        session: AnySession,
        *,
        limit: int = 20,
        task: str | None = None,
        since: timedelta | None = None,
    ) -> list[Failures]:
        """Return the errors of jobs, those of one kind together.

        Args:
            session: A Session or Connection to read with.
            limit: How many kinds at most.
            task: Only errors of this task.
            since: Only errors that have occurred since.

        Returns:
            The errors, the newest first.
        """
        return ErrorGroups(executor(session)).newest(limit=limit, task=task, since=since)

    def error_types(self, session: AnySession, fingerprints: Iterable[int]) -> dict[int, str]:
        """Return the types of errors.

        Args:
            session: A Session or Connection to read with.
            fingerprints: The numbers of the errors.

        Returns:
            The names of the types by number.
        """
        return ErrorGroups(executor(session)).types(fingerprints)

    def failures(
        self,
        session: AnySession,
        jobs: Selection = EVERY_JOB,
        *,
        limit: int = 50,
        since: timedelta | None = None,
    ) -> list[FailedGroup]:
        """Return the errors of the failed jobs of a selection, those of one kind together.

        Args:
            session: A Session or Connection to read with.
            jobs: Which jobs.
            limit: How many kinds at most.
            since: Only errors that have occurred since.

        Returns:
            The errors, the newest first.
        """
        return FailedGroups(executor(session)).newest(
            jobs.which, limit=limit, since=since, is_limited=jobs.is_scoped
        )

    def failure(
        self, session: AnySession, jobs: Selection, fingerprint: int, task: str
    ) -> FailedGroup | None:
        """Return one kind of error of the failed jobs of a selection.

        Args:
            session: A Session or Connection to read with.
            jobs: Which jobs.
            fingerprint: The number of the error.
            task: The task that fails with it.

        Returns:
            The error; None if the selection has none.
        """
        return FailedGroups(executor(session)).one(
            jobs.which, fingerprint, task, is_limited=jobs.is_scoped
        )

    def trends(
        self, session: AnySession, jobs: Selection, groups: Sequence[FailedGroup]
    ) -> Mapping[Any, Any]:
        """Return how many jobs have failed with each of some errors, by hours.

        Args:
            session: A Session or Connection to read with.
            jobs: Which jobs.
            groups: The errors, as :meth:`failures` returns them.

        Returns:
            The numbers by error.
        """
        return FailedGroups(executor(session)).trends(jobs.which, groups)

    def number_of_errors(self, session: AnySession) -> int:
        """Return how many kinds of errors failed jobs have, up to a bound.

        Args:
            session: A Session or Connection to read with.

        Returns:
            The number.
        """
        return FailedGroups(executor(session)).number()

    def deploys(self, session: AnySession, since: timedelta) -> list[Deployed]:
        """Return the versions of the application that workers have started lately.

        Args:
            session: A Session or Connection to read with.
            since: How far back.

        Returns:
            The versions, the newest first.
        """
        return ErrorGroups(executor(session)).deploys(since)

    # Operators, and the server

    def log(self, session: AnySession, *, limit: int = 20, **words: Any) -> list[LogEntry]:
        """Return the newest actions of operators.

        Args:
            session: A Session or Connection to read with.
            limit: How many.
            **words: Only those of an ``actor``, of an ``action``, ``before`` an id, or
                ``unfinished`` ones.

        Returns:
            The actions, the newest first.
        """
        return OperatorActions(executor(session)).newest(limit=limit, **words)

    def log_entry(self, session: AnySession, action_id: int) -> LogEntry | None:
        """Return one action of an operator.

        Args:
            session: A Session or Connection to read with.
            action_id: Its id in the log.

        Returns:
            The action; None if there is none with this id.
        """
        return OperatorActions(executor(session)).one(action_id)

    def health(self, session: AnySession) -> Health:
        """Return what reads numbers and settings of the tables and the server.

        Args:
            session: A Session or Connection to read with.

        Returns:
            The reader.
        """
        return Health(executor(session))
