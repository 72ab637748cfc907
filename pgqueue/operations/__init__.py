"""What an operator may do: the actions, the jobs that they select, and who has done them."""

from pgqueue.operations.acting import AsyncOperator, Operator
from pgqueue.operations.engine import ActionRun
from pgqueue.operations.operations import Operations
from pgqueue.operations.results import Result
from pgqueue.operations.selection import Selection

__all__ = ["ActionRun", "AsyncOperator", "Operations", "Operator", "Result", "Selection"]
