"""The worker: threads that call the packages below, which decide about jobs.

    claimer --claims--> job buffer (a heap) --> slots (handler threads) --> settler (in batches)

Heartbeat, upkeep, timers and janitor run beside them, each on a connection of its own.  If a
handler runs in a child process, its slot waits for it.
"""

from pgqueue.worker.health import WorkerHealth
from pgqueue.worker.worker import Worker

__all__ = ["Worker", "WorkerHealth"]
