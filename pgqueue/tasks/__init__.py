"""Tasks, and how a call of a task is bound to arguments and options."""

from pgqueue.tasks.task import Task

__all__ = ["Task"]
