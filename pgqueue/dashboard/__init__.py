"""The dashboard: pages on which operators see jobs and act on them.  Needs ``[dashboard]``."""

from pgqueue.dashboard.access import RIGHTS, Access
from pgqueue.dashboard.dashboard import Authorize, Dashboard

__all__ = ["RIGHTS", "Access", "Authorize", "Dashboard"]
