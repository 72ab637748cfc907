"""Every order of the statements of every two sessions, without leaving out any."""

import pytest
from sqlalchemy import Engine

from chaos.interleavings.runner import ScriptRunner
from chaos.interleavings.scheduler import EveryOrder
from chaos.interleavings.scripts import OPENINGS, repertoire


@pytest.mark.battery
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("opening", OPENINGS)
def test_a_job_ends_once_in_every_order(engine: Engine, database_url: str, opening: str) -> None:
    theatre = ScriptRunner(database_url, engine)
    try:
        for play in repertoire():
            every = EveryOrder()
            while play.opening == opening:
                theatre.put_on(play, every)
                if not every.turn():
                    break
        theatre.check()
    finally:
        theatre.close()
        print(f"{theatre.orders:,} orders from {opening!r}")
