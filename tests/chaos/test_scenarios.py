"""Every scenario of the chaos battery in its short form: sound without its bug, red with it."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import directory_for_server
from sqlalchemy import text

from chaos import scenario
from chaos.environment import Environment
from chaos.mutations import load as load_plants
from chaos.mutations import mutated
from chaos.running import SETTINGS, play
from chaos.scenario import Scenario, Server, Size
from pgqueue import PgQueue
from pgqueue.embedded import EmbeddedPostgres
from pgqueue.testing.databases import fresh_database

SCENARIOS = scenario.load()
SEED = 7
TRIES = 3


EVERY = pytest.mark.parametrize(
    "one", [pytest.param(one, id=one.name) for one in SCENARIOS.values()]
)
EVERY_BUG = pytest.mark.parametrize(
    ("one", "bug"),
    [
        pytest.param(one, bug, id=f"{one.name}-{bug}")
        for one in SCENARIOS.values()
        for bug in one.mutated
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


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """What a server of its own begins with: making it takes longer than copying it."""
    with directory_for_server() as path:
        with EmbeddedPostgres(path / "postgres", settings=SETTINGS) as server:
            queue = PgQueue(server.url)
            queue.upgrade()
            queue.engine.dispose()
        yield path / "postgres"


@pytest.fixture
def given_cluster(given_url: str | None, request: pytest.FixtureRequest) -> Path | None:
    """For a scenario that has a server of its own."""
    if given_url is not None:
        return None
    path: Path = request.getfixturevalue("cluster")
    return path


@pytest.mark.chaos
@EVERY
def test_the_promise_holds(
    one: Scenario, given_url: str | None, given_cluster: Path | None, server_directory: Path
) -> None:
    verdict = play(
        one, one.short, server_directory, seed=SEED, url=given_url, cluster=given_cluster
    )

    assert verdict.broken is None, verdict.broken


def test_a_bound_that_is_missed_tells_of_the_server_and_the_machine(
    database_url: str, server_directory: Path
) -> None:
    def wait_in_vain(environment: Environment, _size: Size) -> None:
        with environment.engine.begin() as connection:
            connection.execute(text("SELECT 4711"))
            environment.until(lambda: False, seconds=0.1, what="it comes")

    one = replace(SCENARIOS["damaged_rows"], run=wait_in_vain)

    verdict = play(one, one.short, server_directory, seed=SEED, url=database_url)

    for words in ("not within 0.1 s: it comes", "'idle in transaction'", "SELECT 4711"):
        assert words in str(verdict.broken)
    assert re.search(r"the machine, in its last .* s late, a byte .* disk", str(verdict.broken))


@pytest.mark.chaos
@EVERY_BUG
def test_the_planted_bug_is_caught(
    one: Scenario,
    bug: str,
    given_url: str | None,
    given_cluster: Path | None,
    server_directory: Path,
    request: pytest.FixtureRequest,
) -> None:
    """By one of three runs: who meets whom depends on the machine, and a short run is short."""
    told = []
    for number in range(TRIES):
        folder = server_directory / str(number)
        folder.mkdir(mode=0o711)
        url = given_url if number == 0 else _another(given_url, request)
        verdict = play(
            one, one.short, folder, seed=SEED + number, url=url, cluster=given_cluster, mutation=bug
        )
        print(verdict.broken)
        if verdict.broken and re.search(one.mutated[bug], verdict.broken, re.DOTALL):
            return
        told.append(verdict.broken)

    assert any(told), f"{one.name} stays green with {bug}"
    pytest.fail(f"{one.name} fails with {bug} for other reasons: {told}")


def _another(url: str | None, request: pytest.FixtureRequest) -> str | None:
    """A database that nothing has been done to."""
    if url is None:
        return None
    server, template = (request.getfixturevalue(name) for name in ("server_url", "template_url"))
    fresh = fresh_database(server, template_url=template)
    another = fresh.__enter__()
    request.addfinalizer(lambda: fresh.__exit__(None, None, None))
    return another


def test_every_planted_bug_has_a_scenario() -> None:
    caught = {bug for one in SCENARIOS.values() for bug in one.mutated}

    assert set(load_plants()) == caught
    assert all(one.mutated for one in SCENARIOS.values())


@pytest.mark.parametrize("bug", sorted(load_plants()))
def test_each_planted_bug_finds_what_it_replaces(bug: str) -> None:
    with mutated(bug):
        pass
