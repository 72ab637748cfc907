"""Connections, Sessions and transactions: how they are opened, joined and committed."""
