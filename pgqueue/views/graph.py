"""The graph of a workflow: jobs of one task that wait for the same are one box."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from pgqueue.meta import outcomes_noted
from pgqueue.models import JobStatus
from pgqueue.repository.tables import Executor
from pgqueue.repository.workflow_members import Member, WorkflowMembers
from pgqueue.views.words import when_in_words

MOST_JOBS = 20_000
"""Jobs that are read for a graph.  A larger workflow has none."""
MOST_BOXES = 100
"""Boxes in a graph.  With more, all jobs of a task are one box."""

BY_URGENCY = (
    JobStatus.FAILED,
    JobStatus.RUNNING,
    JobStatus.PENDING,
    JobStatus.BLOCKED,
    JobStatus.CANCELLED,
    JobStatus.SUCCEEDED,
)
"""Which of its jobs gives a box its status: the first of these."""


@dataclass(slots=True)
class Box:
    """Like jobs of a workflow."""

    task: str
    when: str
    """With which outcome of what they wait for the jobs run, as in ``when=`` of an enqueue."""
    first_id: int
    """Its oldest job."""
    counts: Counter[JobStatus] = field(default_factory=Counter)
    after: set[int] = field(default_factory=set)
    """The boxes for which it waits, as positions in the graph."""
    column: int = 0
    """One more than the largest of the boxes for which it waits."""
    row: float = 0.0
    """Its place in the column, of which the middle is that of the longest one."""

    @property
    def total(self) -> int:
        return self.counts.total()

    @property
    def status(self) -> JobStatus:
        return next(status for status in BY_URGENCY if self.counts[status])


@dataclass(frozen=True, slots=True)
class Graph:
    """The boxes of a workflow; each stands behind those for which it waits."""

    boxes: Sequence[Box]
    is_by_task: bool
    """Whether all jobs of a task are one box."""


def read_graph(executor: Executor, workflow_id: int) -> Graph | None:
    """Read the graph of a workflow; None of a batch that is none, and of a very large workflow."""
    rows = WorkflowMembers(executor)
    members = rows.members(workflow_id, limit=MOST_JOBS + 1)
    groups = rows.groups(workflow_id, limit=10 * MOST_JOBS)
    if not 0 < len(members) <= MOST_JOBS:
        return None
    try:
        return graph_of(members, groups)
    except CycleError:  # rows that were written by hand
        return None


def graph_of(members: Sequence[Member], groups: Iterable[tuple[int, int]]) -> Graph:
    """Draw jobs, which wait for each other and for groups of them.

    Args:
        members: The jobs.
        groups: The groups as nodes, each with one of its jobs.
    """
    jobs = {member.id: member for member in members}
    nodes: dict[int, list[int]] = defaultdict(list)
    for group, job_id in groups:
        nodes[group].append(job_id)
    nodes.update((member.id, [*member.after]) for member in members)
    order = [id for id in TopologicalSorter(nodes).static_order() if id in nodes]

    boxes = _boxes(order, nodes, jobs, lambda member, after: (member.task, member.when, after))
    if is_by_task := len(boxes) > MOST_BOXES:
        boxes = _boxes(order, nodes, jobs, lambda member, _: member.task)[:MOST_BOXES]
        for number, box in enumerate(boxes):
            box.after = {other for other in box.after if other < number}  # no circles
    _place(boxes)
    return Graph(boxes, is_by_task)


def _boxes(
    order: Iterable[int],
    nodes: Mapping[int, Sequence[int]],
    jobs: Mapping[int, Member],
    alike: Callable[[Member, frozenset[int]], Hashable],
) -> list[Box]:
    """Jobs whose keys by ``alike`` are equal as one box; its arguments are a job, and the boxes
    for which it waits."""
    boxes: list[Box] = []
    numbers: dict[Hashable, int] = {}
    found: dict[int, frozenset[int]] = {}  # by node; of a group, the boxes of its jobs
    for id in order:
        after = frozenset().union(*(found.get(node, frozenset()) for node in nodes[id]))
        if id not in jobs:
            found[id] = after
            continue
        member = jobs[id]
        number = numbers.setdefault(alike(member, after), len(boxes))
        if number == len(boxes):
            boxes.append(Box(member.task, when_in_words(outcomes_noted(member.when)), id))
        box = boxes[number]
        box.first_id = min(box.first_id, id)
        box.counts[member.status] += 1
        box.after |= after
        found[id] = frozenset([number])
    return boxes


def _place(boxes: Sequence[Box]) -> None:
    """Put each box behind those for which it waits, and beside them where there is room."""
    columns: dict[int, list[Box]] = defaultdict(list)
    for box in boxes:
        box.column = max((boxes[number].column + 1 for number in box.after), default=0)
        columns[box.column].append(box)
    longest = max(map(len, columns.values()), default=0)
    for _, column in sorted(columns.items()):
        # By the mean row of the boxes before it: lines cross less.
        column.sort(key=lambda box: _mean([boxes[number].row for number in box.after]))
        for row, box in enumerate(column):
            box.row = row + (longest - len(column)) / 2


def _mean(rows: Sequence[float]) -> float:
    return sum(rows) / len(rows) if rows else 0.0
