"""The schedules: when each one runs next, and how its last jobs have ended."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.orm import Session

from pgqueue.dashboard.routing import Asked, Done, Page, Refused, Route
from pgqueue.errors import OptionError
from pgqueue.models import JobStatus
from pgqueue.repository.schedules import RECENT, ScheduleRows, ScheduleState
from pgqueue.rules.ticks import zone_of

RUNS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule, as the page shows it."""

    state: ScheduleState
    words: str
    """The rule as a sentence, or why this system cannot read it."""
    next_runs: list[datetime]
    """In the zone of the schedule."""
    results: list[tuple[int, JobStatus]]
    """Its last jobs, the oldest first."""


def schedules(asked: Asked) -> Page:
    rows = None
    if not asked.access.is_limited:
        rows = asked.part("the schedules", lambda session: _read(asked, session))
    return Page(
        "schedules.html", title="Schedules", command="pgqueue schedules", rows=rows, recent=RECENT
    )


def _read(asked: Asked, session: Session) -> list[Row]:
    results = asked.part("the results", lambda session: ScheduleRows(session).results()) or {}
    return [
        _row(state, results.get(state.name, [])) for state in asked.queue.schedules.list(session)
    ]


def _row(state: ScheduleState, results: list[tuple[int, JobStatus]]) -> Row:
    try:
        words, zone = state.rule.in_words(), zone_of(state.timezone)
        runs = [time.astimezone(zone) for time in state.next_runs(RUNS)]
    except (OptionError, OverflowError) as error:  # for lack of its zone, or after the year 9999
        words, runs = str(error), []
    return Row(state, words, runs, results[::-1])


def run_schedule(asked: Asked) -> Done:
    """Enqueue a job of a schedule now; its next tick stays where it is."""
    name = _name(asked)
    job_id = asked.operator.trigger_schedule(name)
    return Done(f"enqueued job {job_id} of schedule {name}", to=asked.back())


def pause_schedule(asked: Asked) -> Done:
    name = _name(asked)
    asked.operator.pause_schedule(name)
    return Done(f"paused schedule {name}", to=asked.back())


def resume_schedule(asked: Asked) -> Done:
    name = _name(asked)
    asked.operator.resume_schedule(name)
    return Done(f"resumed schedule {name}", to=asked.back())


def _name(asked: Asked) -> str:
    if asked.access.is_limited:
        raise Refused(
            "a schedule may have jobs of other queues and tags than yours; nothing was changed", 403
        )
    return asked.posted("schedule")


ROUTES = [
    Route("/schedules", schedules),
    Route("/schedules/run", run_schedule, method="POST", right="schedules"),
    Route("/schedules/pause", pause_schedule, method="POST", right="schedules"),
    Route("/schedules/resume", resume_schedule, method="POST", right="schedules"),
]
