"""The connector that is named after psycopg2, which pgqueue does not use here."""

from ..connectors import Connector


class Psycopg2Connector(Connector):
    """As any other."""
