"""DBOS: a workflow is a function, which enqueues its children on a queue, as the manual advises.

Options: ``graph`` ("fan": all but two are children of the workflow, between its first step and its
last; "steps": all are steps of one workflow).
"""

import threading

from dbos import DBOS, DBOSClient, EnqueueOptions
from protocol import Adapter, Tables, main, note_start, option, url, wait_for_the_others

CONFIG = {
    "name": "benchmark",
    "system_database_url": url(),
    "run_admin_server": False,
    "log_level": "ERROR",
}
QUEUE = "benchmark"


@DBOS.step()
def step(number):
    note_start(number)


@DBOS.workflow()
def child(number):
    note_start(number)


@DBOS.workflow()
def fan(first, jobs):
    step(first)
    queue = DBOS.retrieve_queue(QUEUE)
    numbers = range(first + 1, first + jobs - 1)
    handles = [queue.enqueue(child, number) for number in numbers]
    for handle in handles:
        handle.get_result()
    step(first + jobs - 1)


@DBOS.workflow()
def steps(first, jobs):
    for number in range(first, first + jobs):
        step(number)


class DbosAdapter(Tables, Adapter):
    def setup(self):
        DBOS(config=CONFIG)
        DBOS.launch()  # it makes the tables
        DBOS.register_queue(QUEUE)
        DBOS.destroy()

    def connect(self):
        self.client = DBOSClient(system_database_url=url())

    def empty(self):
        self.sql("TRUNCATE dbos.workflow_status CASCADE")

    def enqueue_bulk(self, first, jobs):
        options = EnqueueOptions(queue_name=QUEUE, workflow_name=option("graph", None))
        self.client.enqueue(options, first, jobs)

    def left(self):
        return self.sql(
            "SELECT count(*) FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING')"
        )[0][0]

    def work(self):
        DBOS(config=CONFIG)
        DBOS.launch()
        wait_for_the_others()
        threading.Event().wait()


if __name__ == "__main__":
    main(DbosAdapter)
