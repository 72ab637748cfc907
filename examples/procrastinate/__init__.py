"""An adapter: Procrastinate's API over pgqueue.  README.md says what it does not have.

With the folder ``examples`` on the path of imports, ``import procrastinate`` finds this package.
"""

from .app import App, Blueprint
from .connectors import PsycopgConnector, SyncPsycopgConnector
from .job_context import JobContext
from .retry import BaseRetryStrategy, RetryDecision, RetryStrategy

__all__ = [
    "App",
    "BaseRetryStrategy",
    "Blueprint",
    "JobContext",
    "PsycopgConnector",
    "RetryDecision",
    "RetryStrategy",
    "SyncPsycopgConnector",
]
