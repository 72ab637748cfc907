"""The log of operators: who has done what, to how many jobs, and what is not finished."""

from functools import partial

from pgqueue import bulk
from pgqueue.dashboard.pages.actions import RIGHTS
from pgqueue.dashboard.routing import Asked, Page, Refused, Route
from pgqueue.repository.operator_actions import Action, OperatorActions

ON_A_PAGE = 50


def log(asked: Asked) -> Page:
    """The newest actions; a user who sees only some of the jobs sees the own actions."""
    actor = asked.access.user if asked.access.is_limited else asked.text("actor")
    action, before = asked.text("action"), asked.whole("before")
    unfinished = asked.one_of("unfinished", ("yes", "no"), "no") == "yes"
    found = asked.part(
        "the log",
        lambda session: OperatorActions(session).newest(
            limit=ON_A_PAGE + 1,
            actor=actor or None,
            action=action or None,
            before=before,
            unfinished=unfinished,
        ),
    )
    has_more = found is not None and len(found) > ON_A_PAGE
    shown = found and found[:ON_A_PAGE]
    return Page(
        "log.html",
        title="Log",
        command="pgqueue log --unfinished" if unfinished else "pgqueue log",
        actions=shown,
        older=shown[-1].id if shown and has_more else None,
        actor=actor,
        action=action,
        is_unfinished=unfinished,
        is_limited=asked.access.is_limited,
        target_in_words=partial(_target, asked),
        endpoint_of=lambda action: _endpoint(asked, action),
    )


def log_entry(asked: Asked, action_id: int) -> Page:
    """One action."""
    action = OperatorActions(asked.session).one(action_id)
    if action is None or (asked.access.is_limited and action.actor != asked.access.user):
        raise Refused(f"there is no action {action_id}; actions are kept for 90 days", 404)
    return Page(
        "log_entry.html",
        title=f"{action.action.replace('_', ' ').capitalize()}, action {action_id}",
        command=f"pgqueue log --before {action_id + 1} --limit 1",
        action=action,
        target=_target(asked, action),
        endpoint=_endpoint(asked, action),
        is_working=False,
        left=(),
    )


def _target(asked: Asked, action: Action) -> str:
    return bulk.target_in_words(action, show_arguments=asked.may("view_arguments"))


def _endpoint(asked: Asked, action: Action) -> str | None:
    """Where the user can go on with an action; None if it is finished, or without the right."""
    right = RIGHTS.get(action.action)
    if action.finished_at is not None or right is None or not asked.may(right):
        return None
    return f"act_{right}" if bulk.is_resumable(action) else None


ROUTES = [Route("/log", log), Route("/log/<int:action_id>", log_entry)]
