"""Every case registers itself on import, in the order of the table of goals."""

from benchmarks.cases import drains as drains
from benchmarks.cases import enqueues as enqueues
from benchmarks.cases import pickup as pickup
