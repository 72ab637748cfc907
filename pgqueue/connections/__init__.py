"""Connections: how they are opened, set up, watched and given up."""
