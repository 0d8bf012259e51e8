"""Statistics -> decisions: what a cache would do with a data set, before anything is trained."""

from hotbed.plan.optimum import optimum, optimum_by_batch
from hotbed.plan.trace import Trace, read_trace, trace_of

__all__ = ["Trace", "optimum", "optimum_by_batch", "read_trace", "trace_of"]
