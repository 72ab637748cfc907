"""The worker: loops around the verbs below it, and nothing that decides about a job.

    claimer --claims--> job buffer (a heap) --> slots (handler threads) --> settler (in batches)

A heartbeat and a rescuer run beside them, each on a connection of its own.  In
transaction mode the slots claim for themselves.  A handler may run in a child process, which its
slot waits for.
"""

from pgqueue.worker.config import Mode
from pgqueue.worker.worker import Worker

__all__ = ["Mode", "Worker"]
