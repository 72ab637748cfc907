"""What a program gets of pgqueue by its first import."""

import subprocess
import sys

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from pgqueue import MessageQueue, PgQueue, public


@pytest.mark.parametrize(
    "names",
    ["dir(pgqueue)", "pgqueue.__all__", "exec('from pgqueue import *') or locals()"],
    ids=["dir", "all", "star"],
)
def test_the_public_names_are_those_of_pgqueue(names: str) -> None:
    code = f"import pgqueue; print(*{names})"

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert {*public.__all__} <= {*ended.stdout.split()}


def test_the_table_of_jobs_alone_deletes_a_job_with_its_message(
    engine: Engine, database_url: str
) -> None:
    queue = PgQueue(engine)

    @queue.task
    def mail() -> None: ...

    with queue.session() as session, session.begin():
        job_id = mail.enqueue(session).id
    code = (
        "import sys; from sqlalchemy import create_engine; from sqlalchemy.orm import Session; "
        "from pgqueue.tables import Job\n"
        "with Session(create_engine(sys.argv[1])) as session, session.begin():"
        "    session.delete(session.get_one(Job, int(sys.argv[2])))"
    )

    subprocess.run([sys.executable, "-c", code, database_url, str(job_id)], check=True)

    with Session(engine) as session:
        assert session.scalar(select(func.count()).select_from(MessageQueue)) == 0
