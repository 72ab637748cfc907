"""Lease mode: claims and settles in batches; runs handlers in their own transactions."""
