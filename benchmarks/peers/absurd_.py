"""Absurd: a workflow is a function, which spawns its children in another queue and awaits them.

Options: ``graph`` ("fan": all but two are children of the workflow, between its first step and its
last; "steps": all are steps of one task).
"""

import threading

from absurd_sdk import Absurd
from absurdctl import BUNDLED_SCHEMA_SQL
from protocol import Adapter, Tables, main, note_start, option, url, wait_for_the_others

PARENTS, CHILDREN = "parents", "children"
UNFINISHED = " UNION ALL ".join(
    f"SELECT 1 FROM absurd.t_{name} WHERE state IN ('pending', 'running', 'sleeping')"
    for name in (PARENTS, CHILDREN)
)


class AbsurdAdapter(Tables, Adapter):
    def setup(self):
        self.sql(BUNDLED_SCHEMA_SQL)
        client = Absurd(url())
        for name in (PARENTS, CHILDREN):
            client.create_queue(name)

    def connect(self):
        self.client = Absurd(url())

    def empty(self):
        for table in "trcew":
            self.sql(f"TRUNCATE absurd.{table}_{PARENTS}, absurd.{table}_{CHILDREN}")

    def enqueue_bulk(self, first, jobs):
        parameters = {"first": first, "jobs": jobs}
        self.client.spawn(option("graph", None), parameters, queue=PARENTS)

    def left(self):
        return self.sql(f"SELECT count(*) FROM ({UNFINISHED}) AS unfinished")[0][0]

    def work(self):
        parents, children = Absurd(url(), PARENTS), Absurd(url(), CHILDREN)
        spawning = Absurd(url())

        @children.register_task("child")
        def child(parameters, ctx):
            note_start(parameters["number"])

        @parents.register_task("fan")
        def fan(parameters, ctx):
            first, last = bounds_of(parameters)
            ctx.step("first", lambda: note_start(first))
            ids = ctx.step("spawn", lambda: spawn(range(first + 1, last)))
            for task_id in ids:
                ctx.await_task_result(task_id, queue_name=CHILDREN)
            ctx.step("last", lambda: note_start(last))

        def spawn(numbers):
            spawned = [
                spawning.spawn("child", {"number": number}, queue=CHILDREN) for number in numbers
            ]
            return [str(one["task_id"]) for one in spawned]

        @parents.register_task("steps")
        def steps(parameters, ctx):
            first, last = bounds_of(parameters)
            for number in range(first, last + 1):
                ctx.step(f"step {number}", lambda number=number: note_start(number))

        wait_for_the_others()
        threading.Thread(
            target=children.start_worker, kwargs={"concurrency": 10}, daemon=True
        ).start()
        parents.start_worker()


def bounds_of(parameters):
    return parameters["first"], parameters["first"] + parameters["jobs"] - 1


if __name__ == "__main__":
    main(AbsurdAdapter)
