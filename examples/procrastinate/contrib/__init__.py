"""Procrastinate's other connectors."""
