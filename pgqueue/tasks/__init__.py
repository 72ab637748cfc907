"""What a task is, and how a call of it is written down."""

from pgqueue.tasks.task import Task

__all__ = ["Task"]
