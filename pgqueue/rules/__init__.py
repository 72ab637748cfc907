"""What is decided without a database: limits, keys, retries, retention and schedules."""
