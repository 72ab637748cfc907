"""``ACTIONS``: what an operator may do, a row for each action.

The commands, the routes, buttons and rights of the dashboard, the log of operators and the table
of its page in the manual are made of these rows.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import Connection

from pgqueue.errors import OptionError
from pgqueue.models import DEAD, ENDED, UNFINISHED, WAITING, JobStatus
from pgqueue.repository.jobs import Change, Jobs
from pgqueue.repository.listing import JobDetails
from pgqueue.repository.many import ManyJobs
from pgqueue.repository.messages import FoundJob
from pgqueue.tasks import Task, editing
from pgqueue.tasks.editing import Changes, Find


class Target(StrEnum):
    """What an action is done to; the log has its id or name under this word."""

    JOBS = "jobs"
    TASK = "task"
    QUEUE = "queue"
    KEY = "key"
    LIMIT = "limit"
    SCHEDULE = "schedule"
    WORKER = "worker"
    ERROR = "error"
    SIGNAL = "signal"
    WORKFLOW = "workflow"
    ACTION = "action"


@dataclass(frozen=True, slots=True)
class ActionContext:
    """A connection, and what an action on jobs needs besides."""

    connection: Connection
    find: Find
    """Returns the task with this name."""
    notify: bool
    changes: Changes | None = None
    """What a requeue or a change gives the jobs."""
    tasks: Collection[str] = ()
    """The tasks of the application, also under their former names."""
    limited_queues: Collection[str] = ()
    """The queues of the application that have limits: no job moves to them."""
    copies: dict[int, int] = field(default_factory=dict)
    """The new jobs of those that were copied, by their ids."""

    @property
    def jobs(self) -> Jobs:
        return Jobs(self.connection)

    @property
    def many(self) -> ManyJobs:
        return ManyJobs(self.connection)


Times = Mapping[int, datetime | None]
"""When each job is due; None means now."""


class Look(NamedTuple):
    """How a button of the dashboard looks."""

    icon: str
    kind: str = "primary"
    is_in_lists: bool = True
    """Whether lists of jobs have the button, besides the page of one job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What an operator may do."""

    name: str
    """The action in the log, as ``pause_queue``."""
    target: Target
    right: str
    """The right that a user of the dashboard needs for it."""
    help: str
    """What the action does, in one sentence."""
    command: str
    """The words of the command, without arguments."""
    done: str = ""
    """The past participle, as in ``12 jobs requeued``."""

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAction(Action):
    """An action on jobs."""

    target: Target = Target.JOBS
    doing: str
    """The present participle, as ``Requeueing``."""
    statuses: Sequence[JobStatus]
    """The action is for jobs of these statuses."""
    called: str = ""
    """One word for jobs of these statuses; empty if a filter must name a status."""
    is_for_later: bool = False
    """Whether the action is only for jobs that are not due yet."""
    runs_again: bool = False
    """Whether the jobs have ended and run again, and so take their unique keys again."""
    requested: str = ""
    """The column of a job that says since when the action is already requested."""
    needs_process: bool = False
    """Whether the button on the page of a job needs a job that runs in a child process; of many
    jobs, the action cancels the others."""
    why_unchanged: str = ""
    """The reason why a job of these statuses was not changed."""
    needs_changes: bool = False
    """Whether the caller must say what the jobs are given."""
    changes: Changes | None = None
    """What the jobs are given, if the caller does not say."""
    may_spread: bool = False
    """Whether the jobs may become due one after the other."""
    button: Look | None = None
    """The button of the dashboard; only of an action that needs nothing but the jobs."""
    one: Callable[[ActionContext, int, datetime | None], Change]
    """Changes one job, and waits for its lock.  The time: when it is due, if jobs are spread."""
    many: Callable[[ActionContext, Sequence[FoundJob], Times], Mapping[int, Change]]
    """Changes as many of the jobs as one statement can, and waits for no lock; returns the changed
    jobs.  The others are changed by ``one``."""

    def is_for(self, job: JobDetails, task: Task[..., Any] | None) -> bool:
        """Whether the action would change a job.

        ``task``: that of the job; None if the application does not have it.
        """
        is_in_process = task is not None and task.in_process
        return (
            job.status in self.statuses
            and not (self.is_for_later and job.is_due)
            and not (self.requested and job.columns[self.requested] is not None)
            and (not self.needs_process or (job.status is JobStatus.RUNNING and is_in_process))
        )


def check_kill(find: Find, job_id: int, task: str) -> None:
    """Raise OptionError unless the handler of a running job can be killed."""
    if not find(task).in_process:
        raise OptionError(
            f"job {job_id} of task {task} runs in the process of its worker, which cannot "
            "be killed; nothing was changed. Cancel it without kill, and let its handler ask "
            "ctx.is_cancelled(); or give the task executor='process'"
        )


def _requeue(context: ActionContext, job_id: int, run_at: datetime | None) -> Change:
    jobs, changes, find = context.jobs, context.changes, context.find
    return editing.requeue(jobs, job_id, changes, find, notify=context.notify, run_at=run_at)


def _requeue_many(
    context: ActionContext, _: Sequence[FoundJob], times: Times
) -> Mapping[int, Change]:
    return {} if context.changes else context.many.requeue(times, notify=context.notify)


def _cancel(context: ActionContext, job_id: int, _: datetime | None) -> Change:
    return context.jobs.cancel(job_id)


def _kill(context: ActionContext, job_id: int, _: datetime | None) -> Change:
    return context.jobs.cancel(job_id, check_kill=partial(check_kill, context.find, job_id))


def _cancel_many(
    context: ActionContext, found: Sequence[FoundJob], _: Times
) -> Mapping[int, Change]:
    return context.many.cancel(found)


def _run_now(context: ActionContext, job_id: int, _: datetime | None) -> Change:
    return context.jobs.run_now(job_id, notify=context.notify)


def _run_many_now(
    context: ActionContext, found: Sequence[FoundJob], _: Times
) -> Mapping[int, Change]:
    return context.many.run_now(found, notify=context.notify)


def _change(context: ActionContext, job_id: int, _: datetime | None) -> Change:
    assert context.changes is not None, "the action needs_changes"
    jobs, changes, find = context.jobs, context.changes, context.find
    return editing.change(jobs, job_id, changes, find, notify=context.notify)


def _change_many(
    context: ActionContext, found: Sequence[FoundJob], _: Times
) -> Mapping[int, Change]:
    new = None if context.changes is None else context.changes.position()
    if new is None or new.get("queue") in context.limited_queues:
        return {}  # one by one: each is refused, with the reason
    return context.many.change(found, new, tasks=context.tasks, notify=context.notify)


def _run_again(context: ActionContext, job_id: int, run_at: datetime | None) -> Change:
    copy_id = context.jobs.copy(job_id, notify=context.notify, run_at=run_at)
    if copy_id is None:
        return Change.UNCHANGED
    context.copies[job_id] = copy_id
    return Change.COPIED


def _delete(context: ActionContext, job_id: int, _: datetime | None) -> Change:
    return context.jobs.delete(job_id)


def _one_by_one(
    _context: ActionContext, _found: Sequence[FoundJob], _times: Times
) -> Mapping[int, Change]:
    """For an action without a statement for many jobs."""
    return {}


_ON_JOBS = (
    JobAction(
        name="requeue",
        command="requeue",
        right="requeue",
        help="Put failed or cancelled jobs back, with all their attempts available again.",
        doing="Requeueing",
        done="requeued",
        statuses=DEAD,
        runs_again=True,
        may_spread=True,
        button=Look("rotate-ccw"),
        one=_requeue,
        many=_requeue_many,
    ),
    JobAction(
        name="run_again",
        command="run-again",
        right="enqueue",
        help="Enqueue copies of jobs that have ended; the old jobs and their attempts stay.",
        doing="Copying",
        done="copied",
        statuses=ENDED,
        runs_again=True,
        may_spread=True,
        button=Look("copy", ""),
        one=_run_again,
        many=_one_by_one,
    ),
    JobAction(
        name="run_now",
        command="run-now",
        right="requeue",
        help="Make waiting jobs due now: those that were delayed, and those that wait for a retry.",
        doing="Making due now",
        done="due now",
        statuses=WAITING,
        called="waiting",
        is_for_later=True,
        why_unchanged="it is due already",
        button=Look("play", ""),
        one=_run_now,
        many=_run_many_now,
    ),
    JobAction(
        name="change",
        command="change",
        right="edit",
        help="Change waiting jobs: their queue, priority, time, attempts, timeout, tags, meta, or "
        "some of their arguments.",
        doing="Changing",
        done="changed",
        statuses=WAITING,
        called="waiting",
        why_unchanged="it has these values already, or a worker is about to start it",
        needs_changes=True,
        one=_change,
        many=_change_many,
    ),
    JobAction(
        name="cancel",
        command="cancel",
        right="cancel",
        help="Cancel jobs: a waiting job ends at once, a running job is asked to stop.",
        doing="Cancelling",
        done="cancelled",
        statuses=UNFINISHED,
        called="unfinished",
        requested="cancel_requested_at",
        button=Look("x", "danger"),
        one=_cancel,
        many=_cancel_many,
    ),
    JobAction(
        name="kill",
        command="cancel --kill",
        right="cancel",
        help="Cancel jobs, and kill the child processes of those that run.",
        doing="Cancelling",
        done="cancelled",
        statuses=UNFINISHED,
        called="unfinished",
        requested="kill_requested_at",
        needs_process=True,
        button=Look("triangle-alert", "danger", is_in_lists=False),
        one=_kill,
        many=_cancel_many,
    ),
    JobAction(
        name="delete",
        command="delete",
        right="delete",
        help="Delete jobs that do not run, with all that is on record about them.",
        doing="Deleting",
        done="deleted",
        statuses=(*WAITING, *ENDED),
        one=_delete,
        many=_one_by_one,
    ),
)


_ON_OTHERS = (
    Action(
        name="enqueue",
        command="enqueue",
        target=Target.TASK,
        right="enqueue",
        help="Enqueue a job of a task.",
    ),
    Action(
        name="pause_queue",
        command="pause",
        target=Target.QUEUE,
        right="pause",
        help="Make all workers skip a queue, or with `'*'` all queues.",
    ),
    Action(
        name="resume_queue",
        command="resume",
        target=Target.QUEUE,
        right="pause",
        help="End the pause of a queue, or of all queues.",
    ),
    Action(
        name="pause_task",
        command="pause --task",
        target=Target.TASK,
        right="pause",
        help="Make all workers skip a task.",
    ),
    Action(
        name="resume_task",
        command="resume --task",
        target=Target.TASK,
        right="pause",
        help="End the pause of a task.",
    ),
    Action(
        name="pause_key",
        command="pause --key",
        target=Target.KEY,
        right="pause",
        help="Admit no more jobs of one key of a limit.",
    ),
    Action(
        name="resume_key",
        command="resume --key",
        target=Target.KEY,
        right="pause",
        help="End the pause of a key.",
    ),
    Action(
        name="set_limit",
        command="set-limit",
        target=Target.LIMIT,
        right="limits",
        help="Set the capacity of a limit or of one key.",
    ),
    Action(
        name="pause_schedule",
        command="schedules pause",
        target=Target.SCHEDULE,
        right="schedules",
        help="Fire no tick of these schedules until they are resumed.",
        done="paused",
    ),
    Action(
        name="resume_schedule",
        command="schedules resume",
        target=Target.SCHEDULE,
        right="schedules",
        help="End the pause of schedules; the ticks of the pause are not made up.",
        done="resumed",
    ),
    Action(
        name="trigger_schedule",
        command="schedules trigger",
        target=Target.SCHEDULE,
        right="schedules",
        help="Enqueue a job of each schedule now; their next ticks stay where they are.",
        done="triggered",
    ),
    Action(
        name="backfill_schedule",
        command="schedules backfill",
        target=Target.SCHEDULE,
        right="schedules",
        help="Enqueue a job for each tick of a schedule in a time that has passed.",
        done="backfilled",
    ),
    Action(
        name="remove_schedule",
        command="schedules remove",
        target=Target.SCHEDULE,
        right="schedules",
        help="Delete schedules; their jobs stay.",
        done="removed",
    ),
    Action(
        name="quiet",
        command="quiet",
        target=Target.WORKER,
        right="workers",
        help="Make a worker claim no more jobs.",
        done="quiet",
    ),
    Action(
        name="unquiet",
        command="unquiet",
        target=Target.WORKER,
        right="workers",
        help="Make a quiet worker claim jobs again.",
        done="no longer quiet",
    ),
    Action(
        name="restart_workflow",
        command="restart",
        target=Target.WORKFLOW,
        right="requeue",
        help="Start a workflow again from a job on, as a new workflow.",
    ),
    Action(
        name="signal",
        command="signal",
        target=Target.SIGNAL,
        right="signals",
        help="Send a signal, for which jobs wait.",
    ),
    Action(
        name="mute_error",
        command="mute",
        target=Target.ERROR,
        right="requeue",
        help="Leave an error out of the lists of problems for some hours.",
    ),
    Action(
        name="continue",
        command="continue",
        target=Target.ACTION,
        right="",
        help="Go on with the interrupted action of another, with the right of that action.",
    ),
)

ACTIONS: Mapping[str, Action] = {action.name: action for action in (*_ON_JOBS, *_ON_OTHERS)}
"""What an operator may do, by name."""

ON_JOBS: Mapping[str, JobAction] = {action.name: action for action in _ON_JOBS}
"""The actions on jobs, by name."""

BUTTONS = [action.name for action in _ON_JOBS if action.button is not None]
"""The names of the actions that have a button in the dashboard."""
