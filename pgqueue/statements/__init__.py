"""Every SQL statement, returned as a value: building one needs no engine.

Statements are built once and cached, so that a call only binds its parameters.
:mod:`pgqueue.repository` runs them, and the code that began the transaction commits them.  Two
rules hold for all: comparisons in a claim use ``statement_timestamp()``, which can be an index
bound, and writes use ``clock_timestamp()``, because ``now()`` is the start of the transaction.
"""
