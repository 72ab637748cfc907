"""The hosted workflows run what a developer runs: targets of the Makefile, on what is promised."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MATRIX_OF_TARGETS = re.compile(r"^ +target:(.*?)^    steps:", re.MULTILINE | re.DOTALL)
WORD = re.compile(r"[a-z][a-z-]+")


def test_hosted_workflows_run_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    named: set[str] = set()
    for workflow in WORKFLOWS:
        text = workflow.read_text("utf-8")
        named.update(re.findall(r"\bmake ([a-z-]+)", text))
        for listed in MATRIX_OF_TARGETS.findall(text):
            named.update(WORD.findall(listed))

    assert named >= {"test", "journeys", "release", "battery", "bench"}
    assert named - targets == set()


def test_no_part_of_make_check_is_left_out() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    parts = re.findall(r"^check: (.*?) ##", makefile, re.M)[0].split()
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")

    assert [part for part in parts if not re.search(rf"[\s-]{part}\b", ci)] == []
