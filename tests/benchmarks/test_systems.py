"""The queues that are measured beside pgqueue."""

from pathlib import Path

import pytest

from benchmarks.case import Bench
from benchmarks.systems import System


def test_a_queue_whose_program_is_missing_is_left_out_in_words(tmp_path: Path) -> None:
    bench = Bench("postgresql://nowhere", tmp_path, with_peers=True)
    system = System("Elsewhere", "elsewhere_.py", ("elsewhere",), programs=("no-such-program",))

    assert not bench.has(system)

    assert bench.missing == ["Elsewhere: no-such-program is not installed"]
    assert not system.is_installed


@pytest.mark.parametrize("requirement", ["celery[redis]==5.7.0", "pg-boss@12.38.0", "pq"])
def test_the_first_requirement_of_a_queue_is_its_distribution(requirement: str) -> None:
    system = System("Elsewhere", "elsewhere_.py", (requirement, "psycopg"))

    assert requirement.startswith(system.distribution)
    assert system.distribution.replace("-", "").isalnum()
