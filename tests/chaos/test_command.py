"""``python -m chaos`` plays scenarios in processes of their own, and its exit code tells."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize(("plant", "code"), [(None, 0), ("payload_decoded_in_the_claim", 1)])
def test_a_scenario_holds_and_breaks_with_a_planted_bug(plant: str | None, code: int) -> None:
    command = [sys.executable, "-m", "chaos", "play", "damaged_rows", "--short"]

    ended = subprocess.run([*command, *(["--plant", plant] if plant else [])])

    assert ended.returncode == code


def test_the_battery_plays_what_is_chosen() -> None:
    command = [sys.executable, "-m", "chaos", "--short", "--seed", "1", "--only", "damaged_rows"]

    assert subprocess.run(command).returncode == 0
