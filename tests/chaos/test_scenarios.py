"""Every scenario of the chaos battery in its short form: sound without its bug, red with it."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos import scenario
from chaos.plants import load as load_plants
from chaos.running import play
from chaos.scenario import Scenario, Server

SCENARIOS = scenario.load()
SEED = 7


# `make test` has ten minutes: what needs a server of its own is for `make battery`.
EVERY = pytest.mark.parametrize(
    "one",
    [
        pytest.param(
            one, id=one.name, marks=[pytest.mark.battery] if one.server is Server.OWN else []
        )
        for one in SCENARIOS.values()
    ],
)
EVERY_BUG = pytest.mark.parametrize(
    ("one", "bug"),
    [
        pytest.param(one, bug, id=f"{one.name}-{bug}")
        for one in SCENARIOS.values()
        for bug in one.planted
    ],
)


@pytest.fixture
def given_url(one: Scenario, request: pytest.FixtureRequest) -> str | None:
    """A database of the tests' own server, for a scenario that does nothing to its server."""
    if missing := one.missing():
        pytest.skip(f"needs {', '.join(missing)}")
    if one.server is Server.OWN:
        return None
    url: str = request.getfixturevalue("database_url")
    return url


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not pytest's own folder, which is closed to the account that runs the server of root.
    path = Path(tempfile.mkdtemp(prefix="pgqueue-chaos-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@EVERY
def test_the_promise_holds(one: Scenario, given_url: str | None, folder: Path) -> None:
    verdict = play(one, one.short, folder, seed=SEED, url=given_url)

    assert verdict.broken is None, verdict.broken


@pytest.mark.battery  # as long again: `make test` has ten minutes
@EVERY_BUG
def test_the_planted_bug_is_caught(
    one: Scenario, bug: str, given_url: str | None, folder: Path
) -> None:
    verdict = play(one, one.short, folder, seed=SEED, url=given_url, plant=bug)

    print(verdict.broken)
    assert verdict.broken is not None, f"{one.name} stays green with {bug}"
    assert re.search(one.planted[bug], verdict.broken, re.DOTALL), "it fails, and is not caught"


def test_every_planted_bug_has_a_scenario() -> None:
    caught = {bug for one in SCENARIOS.values() for bug in one.planted}

    assert set(load_plants()) == caught
    assert all(one.planted for one in SCENARIOS.values())
