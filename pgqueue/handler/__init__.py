"""One attempt of one job, from its claim to its COMMIT."""
