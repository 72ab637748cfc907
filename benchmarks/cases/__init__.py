"""Every case registers itself on import, in the order of the table of goals."""

# isort: off
from benchmarks.cases import drains as drains
from benchmarks.cases import limited as limited
from benchmarks.cases import batches as batches
from benchmarks.cases import workflows as workflows
from benchmarks.cases import enqueues as enqueues
from benchmarks.cases import pickup as pickup
from benchmarks.cases import starts as starts
from benchmarks.cases import claims as claims
from benchmarks.cases import unkind as unkind
from benchmarks.cases import costs as costs
from benchmarks.cases import idle as idle
from benchmarks.cases import retention as retention
from benchmarks.cases import pages as pages
