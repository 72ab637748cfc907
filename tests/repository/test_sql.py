"""The SQL that a claim, a settle and an enqueue send, as it stands in ``tests/repository/sql``.

After a change of a statement, ``PYTHONPATH=tests/helpers python -m tests.repository.test_sql``
writes the files anew.
"""

import textwrap
from pathlib import Path

import pytest
from sqlalchemy import Executable
from traps import words_of

from pgqueue.repository.claim import claim
from pgqueue.repository.enqueue import enqueue_job
from pgqueue.repository.messages import Start
from pgqueue.repository.settle import settle

FOLDER = Path(__file__).parent / "sql"
STATEMENTS = {
    "claim": claim(ahead=False, suspects=True),
    "enqueue": enqueue_job(start=Start.NOW, unique=False, notify=True),
    "settle": settle(),
}


@pytest.mark.parametrize(("name", "statement"), STATEMENTS.items())
def test_the_sql_of_a_statement_is_the_one_in_its_file(name: str, statement: Executable) -> None:
    written = (FOLDER / f"{name}.sql").read_text("utf-8")

    assert words_of(statement).split() == written.split(), (
        f"{name}.sql: the statement has changed; if it should, run "
        "`PYTHONPATH=tests/helpers python -m tests.repository.test_sql` and read the difference"
    )


def in_short_lines(words: str) -> str:
    wrapped = [
        textwrap.fill(
            line, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        for line in words.splitlines()
    ]
    return "\n".join(wrapped) + "\n"


if __name__ == "__main__":
    for name, statement in STATEMENTS.items():
        (FOLDER / f"{name}.sql").write_text(in_short_lines(words_of(statement)), "utf-8")
