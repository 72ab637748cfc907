"""The graph of a workflow: like jobs in one box, each behind those for which it waits."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from pgqueue import JobStatus, PgQueue, Worker
from pgqueue.models import JobStatus as Status
from pgqueue.repository.workflow_members import Member
from pgqueue.views.graph import MOST_BOXES, graph_of


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    queue = PgQueue(engine)

    @queue.task(name="load", max_attempts=1)
    def load(number: int) -> None:
        if number == 1:
            raise ValueError("no such file")

    for name in ("plan", "clean", "report", "apologize"):
        queue.task(name=name)(lambda number: None)
    return queue


@pytest.fixture
def session(queue: PgQueue) -> Iterator[Session]:
    with queue.session() as session:
        yield session


def workflow(queue: PgQueue, session: Session) -> tuple[int, int]:
    """A plan, three files, each of which is loaded and cleaned, and a report or an apology."""
    tasks = queue.tasks
    with session.begin(), queue.workflow(session, "import") as flow:
        plan = flow.add(tasks["plan"].job(0))
        with flow.group("files") as files:
            loads = [flow.add(tasks["load"].job(n), after=plan) for n in range(3)]
            for n, load in enumerate(loads):
                flow.add(tasks["clean"].job(n), after=load)
        flow.add(tasks["report"].job(0), after=files)
        flow.add(tasks["apologize"].job(0), after=files, when="failed")
        return flow.id, loads[1].id


def test_like_jobs_are_one_box_behind_those_for_which_they_wait(
    queue: PgQueue, session: Session
) -> None:
    id, _ = workflow(queue, session)

    with session.begin():
        graph = queue.views.graph(session, id)

    assert graph is not None
    drawn = {
        box.task: (box.total, box.column, sorted(graph.boxes[n].task for n in box.after), box.when)
        for box in graph.boxes
    }
    assert drawn == {
        "plan": (1, 0, [], "succeeded"),
        "load": (3, 1, ["plan"], "succeeded"),
        "clean": (3, 2, ["load"], "succeeded"),
        "report": (1, 3, ["clean", "load"], "succeeded"),
        "apologize": (1, 3, ["clean", "load"], "failed"),
    }
    places = [(box.column, box.row) for box in graph.boxes]
    assert len(set(places)) == len(places)


def test_the_first_failure_names_what_its_requeue_brings_back(
    queue: PgQueue, session: Session
) -> None:
    id, failed = workflow(queue, session)
    Worker(queue).run_until_empty(timeout=60)

    with session.begin():
        first = queue.views.first_failure(session, id)
        graph = queue.views.graph(session, id)

    assert graph is not None
    assert first is not None
    assert (first.job_id, first.task, first.error) == (failed, "load", "no such file")
    cancelled = sum(box.counts[JobStatus.CANCELLED] for box in graph.boxes)
    assert first.skipped == cancelled == 2, "a cleaning and the report"


def test_a_batch_that_is_no_workflow_has_no_graph(queue: PgQueue, session: Session) -> None:
    with session.begin(), queue.batch(session) as batch:
        queue.tasks["plan"].enqueue(session, 1)

    with session.begin():
        assert queue.views.graph(session, batch.id) is None
        assert queue.views.first_failure(session, batch.id) is None


def test_jobs_that_wait_for_each_other_by_hand_have_no_graph(
    queue: PgQueue, session: Session
) -> None:
    id, failed = workflow(queue, session)
    with session.begin():
        turned = "SELECT after_id, job_id FROM pgqueue.dependencies WHERE job_id = :job"
        session.execute(text(f"INSERT INTO pgqueue.dependencies {turned}"), {"job": failed})

    with session.begin():
        assert queue.views.graph(session, id) is None


def test_a_graph_of_too_many_boxes_has_one_for_each_task() -> None:
    # Each job waits for the one before it, so no two are alike.
    tasks = ("load", "clean")
    count = MOST_BOXES + 20
    chain = [
        Member(n, tasks[n % 2], Status.PENDING, None, [n - 1] if n else []) for n in range(count)
    ]

    graph = graph_of(chain, [])

    assert graph.is_by_task
    assert [(box.task, box.total, box.after) for box in graph.boxes] == [
        ("load", count // 2, set()),
        ("clean", count // 2, {0}),
    ]


def test_a_job_that_was_added_before_an_older_one_is_drawn_before_it() -> None:
    members = [
        Member(1, "load", Status.SUCCEEDED, None, []),
        Member(2, "report", Status.BLOCKED, None, [1, -9]),
        Member(3, "check", Status.RUNNING, None, [1]),
    ]

    graph = graph_of(members, [(-9, 3)])

    assert {box.task: box.column for box in graph.boxes} == {"load": 0, "check": 1, "report": 2}
