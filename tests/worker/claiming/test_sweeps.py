"""When the next sweep is due."""

from pgqueue.worker.claiming.sweeps import LATEST_SWEEP, Sweeps


def test_the_first_sweep_is_due_at_once() -> None:
    assert Sweeps(["a"]).is_due(100.0, elected=False)


def test_the_elected_worker_sweeps_after_a_second_the_others_after_five() -> None:
    sweeps = Sweeps(["a"])
    sweeps.swept(began=100.0, ended=100.0)

    assert not sweeps.is_due(100.9, elected=True)
    assert sweeps.is_due(101.0, elected=True)
    assert not sweeps.is_due(104.9, elected=False)
    assert sweeps.is_due(100.0 + LATEST_SWEEP, elected=False)


def test_after_slow_sweeps_the_worker_rests_fifty_times_as_long_up_to_five_seconds() -> None:
    sweeps = Sweeps(["a"])
    sweeps.swept(began=98.9, ended=99.0)
    assert sweeps.is_cheap(99.0)  # one may be slow because the machine is busy
    sweeps.swept(began=99.95, ended=100.0)
    assert not sweeps.is_due(102.4, elected=True)
    assert not sweeps.is_cheap(102.4)
    assert sweeps.is_due(102.6, elected=True)
    assert sweeps.is_cheap(102.6)

    for _ in range(2):
        sweeps.swept(began=90.0, ended=100.0)
    assert sweeps.is_due(100.0 + LATEST_SWEEP, elected=True)
    assert not sweeps.is_cheap(100.0 + LATEST_SWEEP)
