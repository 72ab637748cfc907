"""Rows damaged behind our back cost their own job, and no other."""

from pathlib import Path
from typing import Any

import chores
import pytest
from bad_rows import (
    EXHAUSTED,
    NEVER_RUNS,
    ODDITIES,
    OF_ANOTHER_VERSION,
    REFUSED,
    RUNS_ANYWAY,
    UNREADABLE,
)
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from worker_rig import Rig


def test_a_damaged_row_costs_its_own_job_and_no_other(database_url: str, tmp_path: Path) -> None:
    def enqueue(session: Session, task: Any) -> int:
        return int(task.enqueue(session, 1).id)

    with Rig(database_url, tmp_path) as rig:
        with rig.session() as session:
            good = chores.quick.enqueue_many(session, [(n,) for n in range(20)])
            unreadable = {
                args: enqueue(session, chores.brief if args == "{}" else chores.quick)
                for args in (*UNREADABLE, *OF_ANOTHER_VERSION)
            }
            fine = {name: enqueue(session, chores.quick) for name in RUNS_ANYWAY}
            lost = {name: enqueue(session, chores.quick) for name in NEVER_RUNS}
            exhausted, gone, unknown = (enqueue(session, chores.quick) for _ in range(3))
            good += chores.quick.enqueue_many(session, [(n,) for n in range(20)])
            session.commit()
        for args, id in unreadable.items():
            rig.run(
                "UPDATE pgqueue.jobs SET args = CAST(:a AS jsonb) WHERE id = :id", a=args, id=id
            )
        for name, id in fine.items():
            rig.run(f"UPDATE pgqueue.{RUNS_ANYWAY[name]}", id=id)
        for name, id in lost.items():
            rig.run(NEVER_RUNS[name], id=id)
        rig.run(f"UPDATE pgqueue.{EXHAUSTED}", id=exhausted)
        rig.run("DELETE FROM pgqueue.jobs WHERE id = :id", id=gone)
        for table, key in (("jobs", "id"), ("message_queue", "target_id")):
            rig.run(f"UPDATE pgqueue.{table} SET task = 'no.such' WHERE {key} = :id", id=unknown)
        for oddity in ODDITIES:
            rig.run(oddity)

        waiting = {args: unreadable.pop(args) for args in OF_ANOTHER_VERSION}
        rig.start()
        rig.until_ended(*good, *unreadable.values(), *fine.values(), exhausted)
        met = "SELECT count(*) FROM pgqueue.unreadable_jobs"
        rig.until(lambda: rig.scalar(met) == len(waiting), what="the other jobs wait")

        assert {rig.outcome(id) for id in [*good, *fine.values()]} == {"succeeded"}
        assert {rig.outcome(id) for id in [*unreadable.values(), exhausted]} == {"failed"}
        assert rig.outcome(unknown) is None, "it waits for a worker that knows its task"
        for args, id in waiting.items():
            assert (rig.outcome(id), rig.attempts(id)) == (None, 0), args
        for args, id in (unreadable | waiting).items():
            said = rig.scalar("SELECT last_error FROM pgqueue.jobs WHERE id = :id", id=id)
            assert "stored argument" in said, args
            assert (UNREADABLE | OF_ANOTHER_VERSION)[args] in said, args
            assert rig.notes("start", job=id) == []
        found = {(each.job_id, str(each)) for each in rig.check()}
        for name, id in lost.items():
            assert any(job == id and name in each for job, each in found), (name, found)
        assert "waiting for the database" not in rig.workers[0].log.read_text()


def test_what_would_fail_the_claims_of_all_is_refused_by_the_tables(engine: Engine) -> None:
    with Session(engine) as session:
        id = chores.quick.enqueue(session, 1).id
        lease = (
            "INSERT INTO pgqueue.leases (target_id, message_id, attempt, worker_id) "
            "VALUES (:id, 1, 1, gen_random_uuid())"
        )
        session.execute(text(lease), {"id": id})

        for change in REFUSED:
            with pytest.raises(IntegrityError), session.begin_nested():
                session.execute(text(f"UPDATE pgqueue.{change}"))
