"""The table of actions, and what is made of it."""

from pathlib import Path

import pytest

from pgqueue.cli import main
from pgqueue.dashboard.pages import ROUTES
from pgqueue.operations import AsyncOperator, Operator
from pgqueue.operations.actions import ACTIONS, ON_JOBS, Action

MANUAL = Path(__file__).parents[2] / "docs/how-to/operators-log.md"


def test_the_manual_has_the_table() -> None:
    rows = [
        f"| `{one.name}` | {one.target} | {f'`{one.right}`' if one.right else ''} | {one.help} |"
        for one in ACTIONS.values()
    ]
    table = "\n".join(["| action | of | right in the dashboard | |", "|---|---|---|---|", *rows])

    assert table in MANUAL.read_text("utf-8"), f"put this table into {MANUAL.name}:\n{table}"


@pytest.mark.parametrize("name", sorted(ACTIONS.keys() - {"kill", "continue"}))
def test_each_action_is_a_method_of_an_operator(name: str) -> None:
    assert getattr(Operator, name).__doc__
    assert getattr(AsyncOperator, name).__doc__ == getattr(Operator, name).__doc__


def test_each_action_has_a_command() -> None:
    top = main.commands
    schedules = top["schedules"].commands  # type: ignore[attr-defined]
    named = {*top, *(f"{name}-schedule" for name in schedules)}
    others = {"kill": "cancel", "mute_error": "mute"}

    def command_of(one: Action) -> str:
        is_pause = one.name.startswith(("pause_", "resume_")) and one.target != "schedule"
        name = one.name.partition("_")[0] if is_pause else others.get(one.name, one.name)
        return name.replace("_", "-")

    assert {command_of(one) for one in ACTIONS.values()} <= named


def test_each_action_on_jobs_has_its_routes_with_its_right() -> None:
    rights = {route.rule: route.right for route in ROUTES if route.method == "POST"}

    for action in ON_JOBS.values():
        if action.button is not None:
            path = action.name.replace("_", "-")
            assert rights[f"/jobs/<int:job_id>/{path}"] == action.right
            assert rights[f"/actions/{action.right}"] == action.right
