"""Actions on jobs: on those that are selected, and on all that match a filter.

An action on all that match is previewed first.  Then each request works for two seconds, in
several transactions, and its page has a form that goes on: the browser sends it by
itself, and without JavaScript a click does.  How far the action has come is in the log.
"""

import time
from datetime import timedelta

from pgqueue.dashboard.pages.log import entry, errors_of
from pgqueue.dashboard.rendering import number
from pgqueue.dashboard.routing import Answer, Done, Page, Refused, Request, Route
from pgqueue.errors import OptionError
from pgqueue.filter_line import LONGEST
from pgqueue.operations import ActionRun, Selection
from pgqueue.operations.actions import BUTTONS, ON_JOBS, JobAction
from pgqueue.operations.selection import MOST_COUNTED

LONGEST_WORK = 2.0
"""Seconds that a request works on an action."""
LONGEST_SPREAD = 7 * 24 * 60
"""Minutes."""

SPREADS = (
    (0, "now"),
    (5, "over 5 minutes"),
    (20, "over 20 minutes"),
    (60, "over an hour"),
    (360, "over 6 hours"),
)
"""The times over which a form spreads jobs: minutes, and words."""


def preview_action(request: Request) -> Page:
    """What an action on all jobs that match would do."""
    action = ON_JOBS[request.one_of("action", BUTTONS, "requeue")]
    line = request.text("q", longest=LONGEST)
    jobs = _filter(request, line, action.name)
    jobs.narrowed(action)
    found = request.part("the preview", lambda session: jobs.preview(session, action))
    number_of_jobs = None if found is None or found.jobs > MOST_COUNTED else found.jobs
    spread = 20 if number_of_jobs is None or number_of_jobs > 1000 else 5
    spread = 0 if number_of_jobs is not None and number_of_jobs <= 100 else spread
    error = jobs.which.error
    return Page(
        "preview.html",
        title=f"{action.words.capitalize()} all that match",
        command=_command(action, line, spread),
        action=action,
        endpoint=f"act_{action.right}",
        is_allowed=request.may(action.right),
        line=line,
        error=errors_of(request, [error]).get(error),
        found=found,
        most=MOST_COUNTED,
        jobs=number_of_jobs,
        spread=str(spread),
        spreads=[_choice(minutes, words, number_of_jobs) for minutes, words in SPREADS],
    )


def act(request: Request, right: str) -> Answer:
    """Begin an action on all that match, go on with one, or do one to the selected jobs."""
    if going := request.posted_whole("go_on"):
        _check_interrupted(request, going, right)
        return work(request, request.operator.go_on(going))
    action, ids = request.posted("action"), request.ids()
    if action not in BUTTONS or ON_JOBS[action].right != right:
        raise Refused(f"action is {action!r}; give one of {', '.join(BUTTONS)}")
    if line := request.posted("q", longest=LONGEST):
        jobs = _filter(request, line, action)
    elif ids:
        jobs = request.scope(Selection(ids))
    else:
        raise Refused("no job is selected; nothing was changed")
    of = request.posted_whole("of", None, 0, MOST_COUNTED)  # as the preview has counted them
    minutes = request.posted_whole("spread", 0, 0, LONGEST_SPREAD)
    spread = timedelta(minutes=minutes) if minutes and ON_JOBS[action].may_spread else None
    outcome = request.operator.start(action, jobs, spread=spread, of=of)
    return work(request, outcome, to=None if line else request.back())


def _check_interrupted(request: Request, id: int, right: str) -> None:
    """Raise Refused unless the user may go on with an action of the log.

    A limited user goes on only with actions of their own, and only while their scope has all of
    its jobs.
    """
    with request.transaction(read_only=True) as session:
        found = request.queue.views.log_entry(session, id)
    if found is None or (request.access.is_limited and found.actor != request.access.user):
        raise Refused(f"there is no action {id}", 404)
    if found.action not in BUTTONS or ON_JOBS[found.action].right != right:
        raise Refused(f"action {id} is {found.action}, which needs another right", 403)
    jobs, access = Selection.from_target(found.target), request.access
    if jobs.ids is not None:
        with request.transaction(read_only=True) as session:
            request.scope(jobs).check_scope(session)
        return
    for then, now in ((jobs.which.queues, access.queues), (jobs.which.tags, access.tags)):
        if now is not None and (then is None or not then <= set(now)):
            raise Refused(f"action {id} has jobs that you may not see any more", 403)


def work(request: Request, outcome: ActionRun, *, to: str | None = None) -> Answer:
    """Do a part of an action, in several transactions; ``to``: the page that follows."""
    until = time.monotonic() + LONGEST_WORK
    for _ in outcome:
        if time.monotonic() >= until:
            return entry(request, outcome.entry, is_working=True, left=outcome.left)
    if "HX-Request" in request.http.headers:  # the form has sent itself: no other page
        with request.transaction(read_only=True) as session:
            found = request.queue.views.log_entry(session, outcome.entry.id or 0)
        action = found or outcome.entry
        return entry(request, action, is_working=True, left=outcome.left)
    if to is not None and not outcome.changed:
        raise Refused(f"nothing was changed: {outcome.left[0]}", 409)
    return Done(in_words(outcome), to=to or request.url("log_entry", action_id=outcome.entry.id))


def in_words(outcome: ActionRun) -> str:
    """How many jobs were changed, and why the first of the others was not."""
    jobs = "job" if outcome.changed == 1 else "jobs"
    words = f"{number(outcome.changed)} {jobs} {ON_JOBS[outcome.entry.action].done}"
    if outcome.skipped:
        words += f", {number(outcome.skipped)} skipped"
    if outcome.left:
        words += f", such as {outcome.left[0]}"
    return words


def _filter(request: Request, line: str, action: str) -> Selection:
    """The jobs of a filter line that the user may see."""
    try:
        jobs = Selection.from_line(line)
        jobs.check_not_everything(action)
    except OptionError as error:
        raise Refused(str(error)) from error
    if jobs.ids is not None:
        raise Refused(f"{action}: the jobs are chosen by a filter, not by an id")
    request.check_filter(jobs)
    try:
        jobs.check_arguments(request.queue.tasks)
    except OptionError as error:
        raise Refused(str(error), 403) from error
    return request.scope(jobs)


def _command(action: JobAction, line: str, spread: int) -> str:
    over = f" --spread {spread}m" if action.may_spread else ""
    return f"pgqueue {action.command} --where '{line}'{over}" if "'" not in line else ""


def _choice(minutes: int, words: str, jobs: int | None) -> tuple[str, str]:
    """A spread as a form offers it, with how many jobs are due in each minute."""
    rate = f", {number(-(-jobs // minutes))} a minute" if jobs and minutes else ""
    return str(minutes), words + rate


def _route(right: str) -> Route:
    """The route of the actions that need a right, by its name in addresses: ``act_requeue``."""

    def answer(request: Request) -> Answer:
        return act(request, right)

    answer.__name__ = f"act_{right}"
    return Route(f"/actions/{right}", answer, method="POST", right=right)


ROUTES = [
    Route("/actions/preview", preview_action, is_slow=True),
    *map(_route, sorted({ON_JOBS[name].right for name in BUTTONS})),
]
