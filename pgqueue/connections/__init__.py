"""Connections: how they are opened, set up, watched and closed."""
