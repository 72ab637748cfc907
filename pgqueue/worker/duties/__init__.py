"""What every worker can do beside its jobs, and one at a time does: each a loop."""
