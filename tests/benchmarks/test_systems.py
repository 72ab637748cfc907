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
