"""What an operator may do: the actions, the jobs that they select, and who has done them."""

from pgqueue.operations.acting import AsyncOperator, Operator
from pgqueue.operations.engine import Outcome, Result
from pgqueue.operations.operations import Operations
from pgqueue.operations.selection import Selection

__all__ = ["AsyncOperator", "Operations", "Operator", "Outcome", "Result", "Selection"]
