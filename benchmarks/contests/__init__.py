"""Contests with other queues: kill -9, a zombie, a poison job.  ``python -m benchmarks contests``.

Each queue is installed into an environment of its own by the run; none is a dependency.
"""
