"""The errors of jobs, and the deploys of the application: what the faces name of them."""

from pgqueue.repository.error_groups import Deployed, Failures
from pgqueue.repository.failures import MOST_COUNTED, MOST_KINDS, FailedGroup

__all__ = ["MOST_COUNTED", "MOST_KINDS", "Deployed", "FailedGroup", "Failures"]
