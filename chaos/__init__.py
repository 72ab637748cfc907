"""Chaos: real processes, real kills, and a judge.  See README.md beside this file."""
