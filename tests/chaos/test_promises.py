"""The table of promises, and the scenarios that attack them."""

import re
from pathlib import Path

from chaos import scenario

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (P\d+) \| (.*) \| (.*) \|$", re.MULTILINE)
SCENARIOS = scenario.load()


def promises() -> dict[str, list[str]]:
    """What is named as the proof of each promise."""
    page = (ROOT / "docs/explanation/guarantees.md").read_text("utf-8")
    return {name: re.findall(r"`([^`]+)`", proofs) for name, _, proofs in ROW.findall(page)}


def test_all_promises_are_in_the_table() -> None:
    assert list(promises()) == [f"P{number}" for number in range(1, 17)]


def test_what_a_promise_is_shown_by_exists_and_attacks_it() -> None:
    for promise, proofs in promises().items():
        assert proofs
        for proof in proofs:
            if "/" in proof:
                assert (ROOT / proof).is_file(), proof
            else:
                assert promise in SCENARIOS[proof].promises.split(), (promise, proof)


def test_every_scenario_attacks_a_promise_that_is_made() -> None:
    for one in SCENARIOS.values():
        assert set(one.promises.split()) <= set(promises()), one.name
