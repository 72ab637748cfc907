"""The page that the benchmarks write."""

from pathlib import Path

import pytest

import benchmarks.cases  # noqa: F401 - they register themselves
from benchmarks import report
from benchmarks.case import CASES, Finding
from benchmarks.report import About, Result

ABOUT = About("two cores", "PostgreSQL", "usual", ("pgqueue 1",), ())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    page = tmp_path / "benchmarks.md"
    page.write_text("# Benchmarks\n")
    monkeypatch.setattr(report, "PAGE", page)
    monkeypatch.setattr(report, "CHARTS", tmp_path / "charts")
    return page


def result(name: str, figure: float) -> Result:
    finding = Finding()
    finding.add("pgqueue", [figure], "jobs/s")
    return Result(CASES[name], finding, 1.0)


def test_a_run_of_one_case_leaves_the_others_as_they_were(elsewhere: Path) -> None:
    report.write([result(name, 100) for name in CASES], ABOUT)
    before = elsewhere.read_text()

    report.write([result("memory", 7)], ABOUT)

    after = elsewhere.read_text()
    assert [line for line in before.splitlines() if line.startswith("## ")] == [
        line for line in after.splitlines() if line.startswith("## ")
    ]
    assert after.count("| pgqueue | 100 jobs/s |") == len(CASES) - 1
    assert after.count("| pgqueue | 7.00 jobs/s |") == 1
    assert after.startswith("# Benchmarks\n")
