"""The connector that is named after aiopg, which pgqueue does not use."""

from ..connectors import Connector


class AiopgConnector(Connector):
    """As any other."""
