"""Handlers in child processes.

    worker --control--> server --forks--> child <--jobs, notices--> worker

The worker forks one server process when it starts, while it has neither threads nor connections of
its own.  The server has the application, which nobody imports again, and runs none of its code: it
forks a child for each request, within milliseconds, and tells the worker how each child has ended.
A child runs one job at a time, of any task, and is kept for the next job.

``pool`` is the worker's side, ``server`` and ``child`` are the two other processes, and ``channel``
is what the worker and a child say to each other.  The worker waits for neither without a deadline.
"""
