"""Every order of the statements of every two sessions, without leaving out any."""

import pytest
from sqlalchemy import Engine

from chaos.interleavings.runner import ScriptRunner
from chaos.interleavings.scheduler import EveryOrder
from chaos.interleavings.scripts import OPENINGS, all_pairs


@pytest.mark.battery
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("opening", OPENINGS)
def test_a_job_ends_once_in_every_order(engine: Engine, database_url: str, opening: str) -> None:
    runner = ScriptRunner(database_url, engine)
    try:
        for pair in all_pairs():
            every = EveryOrder()
            while pair.opening == opening:
                runner.run(pair, every)
                if not every.turn():
                    break
        runner.check()
    finally:
        runner.close()
        print(f"{runner.orders:,} orders from {opening!r}")
