"""Tasks, and how a call of a task is bound to arguments and options."""

from pgqueue.tasks.task import PreparedJob, Task, queues_of

__all__ = ["PreparedJob", "Task", "queues_of"]
