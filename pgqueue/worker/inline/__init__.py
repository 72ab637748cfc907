"""A worker in the thread and the transaction of a test."""
