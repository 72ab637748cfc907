"""Background jobs that commit with your rows."""
