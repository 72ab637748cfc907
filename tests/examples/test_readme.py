"""The example on the first screen does what the page says, exactly as it is printed there."""

from pathlib import Path

from documents import ROOT, programs_of, run
from sqlalchemy import create_engine, select, text
from sqlalchemy.orm import Session

from pgqueue import Job, JobStatus

LONGEST_EXAMPLE = 18


def first_example() -> str:
    return next(programs_of(ROOT / "README.md")).blocks[0][1]


def test_the_first_example_pays_the_order_and_ends_its_job(
    tmp_path: Path, empty_database_url: str
) -> None:
    run(first_example(), name="shop", directory=tmp_path, database_url=empty_database_url)

    with Session(create_engine(empty_database_url)) as session:
        assert session.scalars(text("SELECT is_paid FROM orders")).all() == [True]
        (job,) = session.scalars(select(Job)).all()
        assert (job.task, job.args) == ("shop.pay", {"order_id": 7})
        assert (job.status, job.attempts) == (JobStatus.SUCCEEDED, 1)


def test_the_first_example_fits_on_the_first_screen() -> None:
    lines = [line for line in first_example().splitlines() if line]

    assert len(lines) <= LONGEST_EXAMPLE
