"""The queues that are measured beside pgqueue."""

from pathlib import Path

from benchmarks.case import Bench
from benchmarks.systems import System


def test_a_queue_whose_program_is_missing_is_left_out_in_words(tmp_path: Path) -> None:
    bench = Bench("postgresql://nowhere", tmp_path, with_peers=True)
    system = System("Elsewhere", "elsewhere_.py", ("elsewhere",), programs=("no-such-program",))

    assert not bench.has(system)

    assert bench.missing == ["Elsewhere: no-such-program is not installed"]
    assert not system.is_installed


def test_a_distribution_is_named_by_the_first_requirement() -> None:
    python = System("Elsewhere", "elsewhere_.py", ("elsewhere-sdk[redis]==5.7.0", "psycopg"))
    node = System("Elsewhere", "elsewhere_.mjs", ("else-where@12.38.0", "pg"))

    assert (python.distribution, node.distribution) == ("elsewhere-sdk", "else-where")
