"""``ACTIONS``: what an operator may do, a row for each action.

The commands, the routes, buttons and rights of the dashboard, the log of operators and the table
of its page in the manual are made of these rows.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import Connection

from pgqueue.errors import OptionError
from pgqueue.models import DEAD, UNFINISHED, WAITING, JobStatus
from pgqueue.repository.jobs import Change, Jobs
from pgqueue.repository.listing import FoundJob, JobDetails
from pgqueue.repository.many import ManyJobs
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
    ACTION = "action"


@dataclass(frozen=True, slots=True)
class ActionContext:
    """What an action on jobs needs on one connection."""

    connection: Connection
    find: Find
    """Returns the task with a name."""
    notify: bool
    changes: Changes | None = None
    """What a requeue or a change gives the jobs."""
    tasks: Collection[str] = ()
    """The tasks of the application, also under their former names."""
    limited_queues: Collection[str] = ()
    """Its queues that have limits, to which no job moves."""

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
    """Whether it is offered for several jobs, and not only for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What an operator may do.  The fields from ``statuses`` on are those of actions on jobs."""

    name: str
    """As the log has it."""
    target: Target
    right: str
    """What a user of the dashboard needs."""
    help: str
    """What it does, in one sentence."""
    command: str
    """The words of its command, without arguments."""
    doing: str = ""
    """Of jobs, while it lasts, as ``Requeueing``."""
    done: str = ""
    """What has become of its jobs or its schedule, as in ``12 jobs requeued``."""
    statuses: Sequence[JobStatus] = ()
    """The jobs that it is for."""
    called: str = ""
    """What these jobs are called together; empty if a filter must name a status."""
    is_for_later: bool = False
    """Whether it is only for jobs that are not due yet."""
    runs_again: bool = False
    """Whether its jobs, which have ended, run again, and take their unique keys again."""
    requested: str = ""
    """The column of a job that says since when this is requested already."""
    needs_process: bool = False
    """Whether one job must run in a child process; of many, the others are cancelled."""
    why_unchanged: str = ""
    """Why one of these jobs was left as it is."""
    needs_changes: bool = False
    """Whether the caller must say what the jobs are given."""
    changes: Changes | None = None
    """What the jobs are given, if the caller does not say."""
    may_spread: bool = False
    """Whether the jobs may become due one after the other."""
    button: Look | None = None
    """Of an action that needs nothing but the jobs."""
    one: Callable[[ActionContext, int, datetime | None], Change] | None = None
    """Changes one job, and waits for its lock.  The time: when it is due, if jobs are spread."""
    many: Callable[[ActionContext, Sequence[FoundJob], Times], Mapping[int, Change]] | None = None
    """Changes those of the jobs that one statement can, and waits for nothing; returns these."""

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")

    def is_for(self, job: JobDetails, task: Task[..., Any] | None) -> bool:
        """Whether it would change this job, whose task is None if the application lacks it."""
        in_process = task is not None and task.in_process
        return (
            job.status in self.statuses
            and not (self.is_for_later and job.is_due)
            and not (self.requested and job.columns[self.requested] is not None)
            and not (self.needs_process and not (job.status is JobStatus.RUNNING and in_process))
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
    assert context.changes is not None, "Operator.start sees to it"
    jobs, changes, find = context.jobs, context.changes, context.find
    return editing.change(jobs, job_id, changes, find, notify=context.notify)


def _change_many(
    context: ActionContext, found: Sequence[FoundJob], _: Times
) -> Mapping[int, Change]:
    new = None if context.changes is None else context.changes.place()
    if new is None or new.get("queue") in context.limited_queues:
        return {}  # one by one: each is refused, with the reason
    return context.many.change(found, new, tasks=context.tasks, notify=context.notify)


_ON_JOBS = (
    Action(
        name="requeue",
        command="requeue",
        target=Target.JOBS,
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
    Action(
        name="run_now",
        command="run-now",
        target=Target.JOBS,
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
    Action(
        name="change",
        command="change",
        target=Target.JOBS,
        right="edit",
        help="Change waiting jobs: their queue, priority, time, or some of their arguments.",
        doing="Changing",
        done="changed",
        statuses=WAITING,
        called="waiting",
        why_unchanged="it has these values already, or a worker is about to start it",
        needs_changes=True,
        one=_change,
        many=_change_many,
    ),
    Action(
        name="cancel",
        command="cancel",
        target=Target.JOBS,
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
    Action(
        name="kill",
        command="cancel --kill",
        target=Target.JOBS,
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
)


def _on(target: Target, name: str, right: str, command: str, help: str, done: str = "") -> Action:
    return Action(name=name, target=target, right=right, command=command, help=help, done=done)


_ON_OTHERS = (
    _on(Target.TASK, "enqueue", "enqueue", "enqueue", "Enqueue a job of a task."),
    _on(Target.QUEUE, "pause_queue", "pause", "pause", "Make all workers skip a queue."),
    _on(Target.QUEUE, "resume_queue", "pause", "resume", "End the pause of a queue."),
    _on(Target.TASK, "pause_task", "pause", "pause --task", "Make all workers skip a task."),
    _on(Target.TASK, "resume_task", "pause", "resume --task", "End the pause of a task."),
    _on(
        Target.KEY, "pause_key", "pause", "pause --key", "Admit no more jobs of one key of a limit."
    ),
    _on(Target.KEY, "resume_key", "pause", "resume --key", "End the pause of a key."),
    _on(
        Target.LIMIT,
        "set_limit",
        "limits",
        "set-limit",
        "Set the capacity of a limit or of one key.",
    ),
    _on(
        Target.SCHEDULE,
        "pause_schedule",
        "schedules",
        "schedules pause",
        "Fire no tick of these schedules until they are resumed.",
        "paused",
    ),
    _on(
        Target.SCHEDULE,
        "resume_schedule",
        "schedules",
        "schedules resume",
        "End the pause of schedules; the ticks of the pause are not made up.",
        "resumed",
    ),
    _on(
        Target.SCHEDULE,
        "trigger_schedule",
        "schedules",
        "schedules trigger",
        "Enqueue a job of each schedule now; their next ticks stay where they are.",
        "triggered",
    ),
    _on(
        Target.SCHEDULE,
        "remove_schedule",
        "schedules",
        "schedules remove",
        "Delete schedules; their jobs stay.",
        "removed",
    ),
    _on(Target.WORKER, "quiet", "workers", "quiet", "Make a worker claim no more jobs."),
    _on(
        Target.ERROR,
        "mute_error",
        "requeue",
        "mute",
        "Do not name an error among what needs someone, for some hours.",
    ),
    _on(
        Target.ACTION,
        "continue",
        "",
        "continue",
        "Go on with the interrupted action of another, with the right of that action.",
    ),
)

ACTIONS: Mapping[str, Action] = {action.name: action for action in (*_ON_JOBS, *_ON_OTHERS)}
"""What an operator may do, by name."""

ON_JOBS: Mapping[str, Action] = {action.name: action for action in _ON_JOBS}
"""The actions on jobs, by name."""

BUTTONS = [action.name for action in _ON_JOBS if action.button is not None]
"""The actions on jobs that the dashboard has a button for."""
