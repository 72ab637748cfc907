"""Tasks, and how a call of a task is bound to arguments and options."""

from pgqueue.tasks.task import PreparedJob, Task

__all__ = ["PreparedJob", "Task"]
