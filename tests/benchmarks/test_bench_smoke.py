"""The benchmarks run: each in its tiniest size."""

import os
import re
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

import benchmarks.cases  # noqa: F401 - they register themselves
from benchmarks.__main__ import main, server_for
from benchmarks.case import CASES


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Not the one of the other tests: some queues connect by TCP only."""
    with server_for(os.environ.get("PGQUEUE_TEST_URL")) as url:
        yield url


@pytest.mark.benchmark
@pytest.mark.parametrize("name", CASES)
def test_a_case_measures_what_it_says(server: str, name: str) -> None:
    ended = CliRunner().invoke(main, ["--smoke", "--only", name, "--url", server])

    assert ended.exit_code == 0, ended.output
    assert f"\n{name}  " in f"\n{ended.output}"
    assert "spoiled" not in ended.output


def test_the_cases_are_listed_by_name() -> None:
    ended = CliRunner().invoke(main, ["list"])

    named = [line for line in ended.stdout.splitlines() if not line.startswith(" ")]
    assert (ended.exit_code, named) == (0, list(CASES))


@pytest.mark.benchmark
def test_a_commit_is_measured_beside_this_tree(server: str) -> None:
    words = ["--smoke", "--only", "command_help", "--turns", "1", "--against", "HEAD"]

    ended = CliRunner().invoke(main, [*words, "--url", server])

    assert ended.exit_code == 0, ended.output
    assert re.search(r"a call +[0-9.,]+ / [0-9.,]+ ms: x [0-9.]+ ", ended.output)
