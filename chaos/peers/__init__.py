"""Three of the scenarios against other queues: ``python -m chaos peers``.

Each queue is installed into an environment of its own by the run; none is a dependency.
"""
