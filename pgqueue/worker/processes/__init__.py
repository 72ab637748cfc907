"""Handlers in child processes."""
