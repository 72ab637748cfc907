"""The benchmarks run: each in its tiniest size."""

import pytest
from click.testing import CliRunner

import benchmarks.cases  # noqa: F401 - they register themselves
from benchmarks.__main__ import main
from benchmarks.case import CASES


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CASES)
def test_a_case_measures_what_it_says(server_url: str, name: str) -> None:
    server = server_url.replace("+psycopg", "")

    ended = CliRunner().invoke(main, ["--smoke", "--only", name, "--url", server])

    assert ended.exit_code == 0, ended.output
    assert f"\n{name}  " in f"\n{ended.output}"
    assert "spoiled" not in ended.output
