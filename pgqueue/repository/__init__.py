"""Statements, and the classes that run them on a given Session or Connection.

A module is about one noun: its statements first, as cached functions that return a value, so that a
call only binds parameters; below them the class that runs them.  Nothing here opens a Session or
commits.  Two rules hold for all statements: comparisons in a claim use ``statement_timestamp()``,
which can be an index bound, and writes use ``clock_timestamp()``, because ``now()`` is the start of
the transaction.
"""
