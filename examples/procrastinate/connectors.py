"""Where the jobs are.  All connectors are one: pgqueue connects by SQLAlchemy and psycopg."""

import json
from collections.abc import Callable
from typing import Any

from sqlalchemy import URL


class Connector:
    """The parameters of a connection; those that are not given come from libpq's variables."""

    def __init__(
        self,
        *,
        json_dumps: Callable[[Any], str] = json.dumps,
        json_loads: Callable[[str], Any] = json.loads,
        **parameters: str,
    ) -> None:
        database = parameters.pop("dbname", None)
        self.url = URL.create("postgresql+psycopg", database=database, query=parameters)
        self._dumps, self.loads = json_dumps, json_loads

    def stored(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments as JSON data."""
        stored: dict[str, Any] = json.loads(self._dumps(kwargs))
        return stored

    def loaded(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that JSON data stands for."""
        loaded: dict[str, Any] = self.loads(json.dumps(stored))
        return loaded


class PsycopgConnector(Connector):
    """For applications with an event loop."""


class SyncPsycopgConnector(Connector):
    """For applications without one."""
