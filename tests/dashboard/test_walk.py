"""The way of an action on many jobs through the code, as the architecture page has it."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from broken_shop import Shop
from sqlalchemy import Engine
from visitor import Visitor

import pgqueue
from pgqueue import JobStatus
from pgqueue.dashboard.pages import actions

PACKAGE = Path(pgqueue.__file__).parent
PAGE = PACKAGE.parent / "docs" / "explanation" / "architecture.md"
DOWNWARDS = ("dashboard", "operations", "tasks", "database", "repository", "arguments")
"""The packages that the action enters: of `tasks` it reads only the settings of a task."""


def module_of(frame: FrameType | None) -> str | None:
    """The module of the package that a frame runs; None for any other code."""
    path = Path(frame.f_code.co_filename) if frame is not None else Path()
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def test_a_requeue_of_all_that_match_goes_down_through_five_packages(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "LONGEST_WORK", 600)
    shop = Shop(engine)
    shop.fail(100)
    ann = Visitor(shop.queue)
    ann.text("/jobs")  # what is read once for each process
    entered: set[str] = set()
    calls: set[tuple[str, str]] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (module := module_of(frame)) is None:
            return
        entered.add(module)
        caller = frame.f_back
        while caller is not None and module_of(caller) is None:
            caller = caller.f_back
        rooms = [name.partition("/")[0] for name in (module_of(caller) or module, module)]
        if all(room in DOWNWARDS for room in rooms):
            calls.add((rooms[0], rooms[1]))

    sys.setprofile(watch)
    try:
        ann.post("/actions/requeue", {"action": "requeue", "q": "status:failed"})
    finally:
        sys.setprofile(None)

    assert set(shop.statuses().values()) == {JobStatus.PENDING}
    way = PAGE.read_text("utf-8").partition("## A requeue of all jobs that match")[2]
    listed = re.findall(r"^\d+\. `([\w/]+\.py)`", way.partition("\n## ")[0], re.MULTILINE)
    assert listed
    assert set(listed) <= entered
    packages = {name.partition("/")[0] for name in entered if "/" in name}
    assert packages == {*DOWNWARDS}
    upwards = {
        (caller, room) for caller, room in calls if DOWNWARDS.index(room) < DOWNWARDS.index(caller)
    }
    assert upwards == {("operations", "dashboard")}, "the transaction that the request has passed"
