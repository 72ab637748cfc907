"""Lease mode: claim and settle in batches, handlers in transactions of their own."""
