"""Actions on jobs: on those that are selected, and on all that match a filter.

An action on all that match is previewed first.  Then each request works for two seconds, in
transactions of a hundred jobs, and its page has a form that goes on: the browser sends it by
itself, and without JavaScript a click does.  How far the action has come is in the log.
"""

import time
from collections.abc import Sequence
from datetime import timedelta

from pgqueue import bulk
from pgqueue.bulk import Result
from pgqueue.dashboard.access import ACTIONS
from pgqueue.dashboard.pages.log import DONE, entry, errors_of
from pgqueue.dashboard.rendering import number
from pgqueue.dashboard.routing import Answer, Asked, Done, Page, Refused, Route
from pgqueue.errors import OptionError
from pgqueue.filter_line import LONGEST, parse
from pgqueue.repository.listing import JobFilter
from pgqueue.repository.operator_actions import Action, OperatorActions

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


def preview_action(asked: Asked) -> Page:
    """What an action on all jobs that match would do."""
    action = asked.one_of("action", ACTIONS, "requeue")
    line = asked.text("q", longest=LONGEST)
    which = _filter(asked, line)
    bulk.narrowed(which, action)
    found = asked.part("the preview", lambda session: bulk.preview(session, action, which))
    jobs = None if found is None or found.jobs > bulk.MOST_COUNTED else found.jobs
    spread = 20 if jobs is None or jobs > 1000 else 5 if jobs > 100 else 0
    return Page(
        "preview.html",
        title=f"{_words(action).capitalize()} all that match",
        command=_command(action, line, spread),
        action=action,
        verb=_words(action),
        endpoint=f"act_{ACTIONS[action]}",
        is_allowed=asked.may(ACTIONS[action]),
        line=line,
        error=errors_of(asked, [which.error]).get(which.error),
        found=found,
        most=bulk.MOST_COUNTED,
        jobs=jobs,
        spread=str(spread),
        spreads=[_choice(minutes, words, jobs) for minutes, words in SPREADS],
    )


def act_requeue(asked: Asked) -> Answer:
    """Requeue jobs, or make them due now."""
    return _act(asked, "requeue")


def act_cancel(asked: Asked) -> Answer:
    """Cancel jobs, perhaps killing their handlers."""
    return _act(asked, "cancel")


def _act(asked: Asked, right: str) -> Answer:
    """Begin an action on all that match, go on with one, or do one to the selected jobs."""
    if going := asked.posted_whole("go_on"):
        begun = _interrupted(asked, going, right)
        _note_successor(asked, begun)
        return _work(asked, begun)
    action = asked.posted("action")
    if ACTIONS.get(action) != right:
        raise Refused(f"action is {action!r}; give one of {', '.join(ACTIONS)}")
    if line := asked.posted("q", longest=LONGEST):
        return _work(asked, _begin(asked, action, _filter(asked, line)))
    ids = asked.ids()
    if not ids:
        raise Refused("no job is selected; nothing was changed")
    return Done(in_words(action, change(asked, action, ids)), to=asked.back())


def change(asked: Asked, action: str, ids: Sequence[int]) -> list[Result]:
    """Do an action to some jobs, and log it, in the transaction of the request.

    Raises Refused if no job was changed.
    """
    asked.check_jobs(ids)
    session, log = asked.session, OperatorActions(asked.session)
    new = bulk.action_on_ids(
        session,
        action,
        ids,
        actor=asked.access.user,
        reason=asked.posted("reason"),
        spread=_spread(asked),
    )
    begun = log.add(new)
    act = bulk.act_of(asked.queue, action)
    begun, results = bulk.step(session, begun, new.target["jobs"], act)
    if not begun.jobs:
        raise Refused(f"nothing was changed: {results[0]}", 409)
    bulk.finish(session, begun)
    return results


def in_words(action: str, results: Sequence[Result]) -> str:
    """How many jobs were changed, and why the first of the others was not."""
    left = [result for result in results if not result.is_changed]
    changed = len(results) - len(left)
    words = f"{changed} job{'' if changed == 1 else 's'} {DONE[action]}"
    return f"{words}; {len(left)} left as they are: {left[0]}" if left else words


def _begin(asked: Asked, action: str, which: JobFilter) -> Action:
    jobs = asked.posted_whole("of", None, 0, bulk.MOST_COUNTED)  # as the preview has counted them
    with asked.transaction() as session:
        new = bulk.action_on_filter(
            session,
            action,
            which,
            actor=asked.access.user,
            reason=asked.posted("reason"),
            spread=_spread(asked) if action == "requeue" else None,
            options={} if jobs is None else {"of": jobs},
        )
        return OperatorActions(session).add(new)


def _interrupted(asked: Asked, id: int, right: str) -> Action:
    """An action of the log that is not finished.

    A user with a scope goes on only with the own actions, and only within the scope of now.
    """
    with asked.transaction(read_only=True) as session:
        found = OperatorActions(session).one(id)
    if found is None or (asked.access.is_limited and found.actor != asked.access.user):
        raise Refused(f"there is no action {id}", 404)
    if ACTIONS.get(found.action) != right:
        raise Refused(f"action {id} is {found.action}, which needs another right", 403)
    _check_scope(asked, found)
    if not bulk.is_resumable(found):
        raise Refused(f"the log does not say how to go on with action {id}", 409)
    return found


def _note_successor(asked: Asked, action: Action) -> None:
    """Log, once, that a user goes on with the action of another."""
    user, id = asked.access.user, action.id or 0
    if user == action.actor:
        return
    with asked.transaction() as session:
        log = OperatorActions(session)
        if not log.has_continued(user, id):
            reason = asked.posted("reason")
            log.add(Action(actor=user, action="continue", target={"action": id}, reason=reason))


def _check_scope(asked: Asked, action: Action) -> None:
    """Raises Refused if jobs of an action may be out of the scope that the user has now."""
    which = bulk.filter_of(action) if "filter" in action.target else JobFilter()
    access = asked.access
    for then, now in ((which.queues, access.queues), (which.tags, access.tags)):
        if now is not None and (then is None or not then <= set(now)):
            raise Refused(f"action {action.id} has jobs that you may not see any more", 403)


def _work(asked: Asked, action: Action) -> Answer:
    """Do a part of an action, in several transactions."""
    until = time.monotonic() + LONGEST_WORK
    act = bulk.act_of(asked.queue, action.action)
    left: list[Result] = []
    for moved, results in bulk.run(asked.transaction, action, act):
        action = moved
        left += [result for result in results if not result.is_changed]
        if time.monotonic() >= until:
            return entry(asked, action, is_working=True, left=left)
    if "HX-Request" in asked.request.headers:  # the form has sent itself: no other page
        with asked.transaction(read_only=True) as session:
            action = OperatorActions(session).one(action.id or 0) or action
        return entry(asked, action, is_working=True, left=left)
    words = f"{number(action.jobs)} job{'' if action.jobs == 1 else 's'} {DONE[action.action]}"
    if action.skipped:
        words += f", {number(action.skipped)} skipped"
    if left:
        words += f", such as {left[0]}"
    return Done(words, to=asked.url("log_entry", action_id=action.id))


def _filter(asked: Asked, line: str) -> JobFilter:
    """The jobs of a filter line that the user may see."""
    try:
        which = parse(line)
    except OptionError as error:
        raise Refused(str(error)) from error
    if isinstance(which, int) or which == JobFilter():
        raise Refused("which jobs? give a filter with at least one condition")
    asked.check_filter(which)
    try:
        bulk.check_arguments(asked.queue, which)
    except OptionError as error:
        raise Refused(str(error), 403) from error
    return asked.scope(which)


def _command(action: str, line: str, spread: int) -> str:
    verb = "cancel --kill" if action == "kill" else action.replace("_", "-")
    over = f" --spread {spread}m" if action == "requeue" else ""
    return f"pgqueue {verb} --where '{line}'{over}" if "'" not in line else ""


def _choice(minutes: int, words: str, jobs: int | None) -> tuple[str, str]:
    """A spread as a form offers it, with how many jobs are due in each minute."""
    rate = f", {number(-(-jobs // minutes))} a minute" if jobs and minutes else ""
    return str(minutes), words + rate


def _spread(asked: Asked) -> timedelta | None:
    minutes = asked.posted_whole("spread", 0, 0, LONGEST_SPREAD)
    return timedelta(minutes=minutes) if minutes else None


def _words(action: str) -> str:
    return action.replace("_", " ")


ROUTES = [
    Route("/actions/preview", preview_action, is_slow=True),
    Route("/actions/requeue", act_requeue, method="POST", right="requeue"),
    Route("/actions/cancel", act_cancel, method="POST", right="cancel"),
]
