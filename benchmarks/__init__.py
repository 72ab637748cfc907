"""Measures pgqueue beside the bare statements it rests on, in one run on one PostgreSQL."""
