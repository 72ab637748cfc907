"""Every SQL statement, each returned as a value: building one needs no engine.

Statements are built once and cached, so that a call costs its parameters and nothing else.
They are run in :mod:`pgqueue.repository`, and committed by whoever opened the transaction.
Two rules hold for all of them: what is compared in a claim is ``statement_timestamp()``, which
an index can use as a bound, and what is written is ``clock_timestamp()``, because ``now()`` is
as old as the transaction.
"""
