"""Which messages a claim takes, and when."""
