"""The table of actions, and what is made of it."""

from pathlib import Path

import click
import pytest

from pgqueue.cli import main
from pgqueue.cli.commands import loaded
from pgqueue.dashboard.pages import ROUTES
from pgqueue.operations import AsyncOperator, Operator
from pgqueue.operations.actions import ACTIONS, ON_JOBS, Action

MANUAL = Path(__file__).parents[2] / "docs/how-to/operators-log.md"


def test_the_manual_has_the_table() -> None:
    rows = [
        f"| `{one.name}` | {one.target} | `pgqueue {one.command}` | "
        f"{f'`{one.right}`' if one.right else ''} | {one.help} |"
        for one in ACTIONS.values()
    ]
    head = "| action | of | command | right in the dashboard | what it does |"
    table = "\n".join([head, "|---|---|---|---|---|", *rows])

    assert table in MANUAL.read_text("utf-8"), f"put this table into {MANUAL.name}:\n{table}"


@pytest.mark.parametrize("name", sorted(ACTIONS.keys() - {"kill", "continue"}))
def test_each_action_is_a_method_of_an_operator(name: str) -> None:
    assert getattr(Operator, name).__doc__
    assert getattr(AsyncOperator, name).__doc__ == getattr(Operator, name).__doc__


@pytest.mark.parametrize("action", ACTIONS.values(), ids=lambda one: one.name)
def test_each_action_has_a_command(action: Action) -> None:
    found: click.Command = main
    for word in action.command.split():
        if word.startswith("--"):
            assert any(word in option.opts for option in found.params)
        else:
            assert isinstance(found, click.Group)
            assert word in found.commands, f"no command `pgqueue {action.command}`"
            found = loaded(found.commands[word])


def test_each_action_on_jobs_has_its_routes_with_its_right() -> None:
    rights = {route.rule: route.right for route in ROUTES if route.method == "POST"}

    for action in ON_JOBS.values():
        if action.button is not None:
            path = action.name.replace("_", "-")
            assert rights[f"/jobs/<int:job_id>/{path}"] == action.right
            assert rights[f"/actions/{action.right}"] == action.right
