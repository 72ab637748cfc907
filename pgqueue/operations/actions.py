"""``ACTIONS``: what an operator may do, a row for each action.

The commands, the routes, buttons and rights of the dashboard, the log of operators and the table
of its page in the manual are made of these rows.  A new action is a row here, the statement that
its functions run, and a test.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from sqlalchemy import Connection

from pgqueue.errors import OptionError
from pgqueue.models import JobStatus
from pgqueue.repository.jobs import Change, Jobs
from pgqueue.repository.listing import UNFINISHED, FoundJob
from pgqueue.repository.many import ManyJobs
from pgqueue.tasks import editing
from pgqueue.tasks.editing import Changes, Find

DEAD = (JobStatus.FAILED, JobStatus.CANCELLED)
WAITING = (JobStatus.PENDING, JobStatus.BLOCKED)


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
class Doing:
    """An action on jobs, as it is done on one connection."""

    connection: Connection
    find: Find
    """Returns the task with a name."""
    notify: bool
    changes: Changes | None = None
    """What a requeue or a change gives the jobs."""
    limited_queues: Collection[str] | None = None
    """The queues that have limits, to which no job moves; None without the application's tasks."""

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
    doing: str = ""
    done: str
    """What has become of the target, as in ``12 jobs requeued``."""
    statuses: Sequence[JobStatus] = ()
    """The jobs that it is for."""
    called: str = ""
    """What these jobs are called together; empty if a filter must name a status."""
    is_for_later: bool = False
    """Whether it is only for jobs that are not due yet."""
    why_unchanged: str = ""
    """Why one of these jobs was left as it is."""
    button: Look | None = None
    """Of an action that needs nothing but the jobs."""
    one: Callable[[Doing, int, datetime | None], Change] | None = None
    """Changes one job, and waits for its lock.  The time: when it is due, if jobs are spread."""
    many: Callable[[Doing, Sequence[FoundJob], Times], Mapping[int, Change]] | None = None
    """Changes those of the jobs that one statement can, and waits for nothing; returns these."""

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")

    @property
    def command(self) -> str:
        """The words of the command that does it, without its arguments."""
        return "cancel --kill" if self.name == "kill" else self.name.replace("_", "-")


def check_kill(find: Find, job_id: int, task: str) -> None:
    """Raise OptionError unless the handler of a running job can be killed."""
    if not find(task).in_process:
        raise OptionError(
            f"job {job_id} of task {task} runs in the process of its worker, which cannot "
            "be killed; nothing was changed. Cancel it without kill, and let its handler ask "
            "ctx.is_cancelled(); or give the task executor='process'"
        )


def _requeue(doing: Doing, job_id: int, run_at: datetime | None) -> Change:
    jobs, changes, find = doing.jobs, doing.changes, doing.find
    return editing.requeue(jobs, job_id, changes, find, notify=doing.notify, run_at=run_at)


def _requeue_many(doing: Doing, _: Sequence[FoundJob], times: Times) -> Mapping[int, Change]:
    return {} if doing.changes else doing.many.requeue(times, notify=doing.notify)


def _cancel(doing: Doing, job_id: int, _: datetime | None) -> Change:
    return doing.jobs.cancel(job_id)


def _kill(doing: Doing, job_id: int, _: datetime | None) -> Change:
    return doing.jobs.cancel(job_id, check_kill=partial(check_kill, doing.find, job_id))


def _cancel_many(doing: Doing, found: Sequence[FoundJob], _: Times) -> Mapping[int, Change]:
    return doing.many.cancel(found)


def _run_now(doing: Doing, job_id: int, _: datetime | None) -> Change:
    return doing.jobs.run_now(job_id, notify=doing.notify)


def _run_many_now(doing: Doing, found: Sequence[FoundJob], _: Times) -> Mapping[int, Change]:
    return doing.many.run_now(found, notify=doing.notify)


def _change(doing: Doing, job_id: int, _: datetime | None) -> Change:
    assert doing.changes is not None, "an action that changes jobs says what"
    return editing.change(doing.jobs, job_id, doing.changes, doing.find, notify=doing.notify)


def _change_many(doing: Doing, found: Sequence[FoundJob], _: Times) -> Mapping[int, Change]:
    new = None if doing.changes is None else doing.changes.place()
    limited = doing.limited_queues
    if new is None or ("queue" in new and (limited is None or new["queue"] in limited)):
        return {}  # one by one: each is refused, with the reason
    return doing.many.change(found, new, notify=doing.notify)


_ON_JOBS = (
    Action(
        name="requeue",
        target=Target.JOBS,
        right="requeue",
        help="Put failed or cancelled jobs back, with all their attempts available again.",
        doing="Requeueing",
        done="requeued",
        statuses=DEAD,
        button=Look("rotate-ccw"),
        one=_requeue,
        many=_requeue_many,
    ),
    Action(
        name="run_now",
        target=Target.JOBS,
        right="requeue",
        help="Make waiting jobs due now: those that were delayed, and those that wait for a retry.",
        doing="Making due now",
        done="due now",
        statuses=WAITING,
        called="waiting",
        is_for_later=True,
        why_unchanged="it is due already",
        button=Look("play"),
        one=_run_now,
        many=_run_many_now,
    ),
    Action(
        name="change",
        target=Target.JOBS,
        right="edit",
        help="Change waiting jobs: their queue, priority, time, or some of their arguments.",
        doing="Changing",
        done="changed",
        statuses=WAITING,
        called="waiting",
        why_unchanged="it has these values already, or a worker is about to start it",
        one=_change,
        many=_change_many,
    ),
    Action(
        name="cancel",
        target=Target.JOBS,
        right="cancel",
        help="Cancel jobs: a waiting job ends at once, a running job is asked to stop.",
        doing="Cancelling",
        done="cancelled",
        statuses=UNFINISHED,
        called="unfinished",
        button=Look("x", "danger"),
        one=_cancel,
        many=_cancel_many,
    ),
    Action(
        name="kill",
        target=Target.JOBS,
        right="cancel",
        help="Cancel jobs, and kill the child processes of those that run.",
        doing="Cancelling",
        done="cancelled",
        statuses=UNFINISHED,
        called="unfinished",
        button=Look("triangle-alert", "danger"),
        one=_kill,
        many=_cancel_many,
    ),
)


def _on(target: Target, name: str, right: str, done: str, help: str) -> Action:
    return Action(name=name, target=target, right=right, done=done, help=help)


_ON_OTHERS = (
    _on(Target.TASK, "enqueue", "enqueue", "enqueued", "Enqueue a job of a task."),
    _on(Target.QUEUE, "pause_queue", "pause", "paused", "Make all workers skip a queue."),
    _on(Target.QUEUE, "resume_queue", "pause", "resumed", "End the pause of a queue."),
    _on(Target.TASK, "pause_task", "pause", "paused", "Make all workers skip a task."),
    _on(Target.TASK, "resume_task", "pause", "resumed", "End the pause of a task."),
    _on(Target.KEY, "pause_key", "pause", "paused", "Admit no more jobs of one key of a limit."),
    _on(Target.KEY, "resume_key", "pause", "resumed", "End the pause of a key."),
    _on(Target.LIMIT, "set_limit", "limits", "set", "Set the capacity of a limit or of one key."),
    _on(
        Target.SCHEDULE,
        "pause_schedule",
        "schedules",
        "paused",
        "Fire no tick of these schedules until `resume`.",
    ),
    _on(
        Target.SCHEDULE,
        "resume_schedule",
        "schedules",
        "resumed",
        "Undo `pause`; the ticks of the pause are not made up.",
    ),
    _on(
        Target.SCHEDULE,
        "trigger_schedule",
        "schedules",
        "triggered",
        "Enqueue a job of each schedule now; their next ticks stay where they are.",
    ),
    _on(
        Target.SCHEDULE,
        "remove_schedule",
        "schedules",
        "removed",
        "Delete schedules; their jobs stay.",
    ),
    _on(Target.WORKER, "quiet", "workers", "quiet", "Make a worker claim no more jobs."),
    _on(
        Target.ERROR,
        "mute_error",
        "requeue",
        "muted",
        "Do not name an error among what needs someone, for some hours.",
    ),
    _on(
        Target.ACTION,
        "continue",
        "",
        "continued",
        "Go on with the interrupted action of another, with the right of that action.",
    ),
)

ACTIONS: Mapping[str, Action] = {action.name: action for action in (*_ON_JOBS, *_ON_OTHERS)}
"""What an operator may do, by name."""

ON_JOBS: Mapping[str, Action] = {action.name: action for action in _ON_JOBS}

BUTTONS = [action.name for action in _ON_JOBS if action.button is not None]
"""The actions on jobs that the dashboard has a button for."""
