"""Statistics -> decisions: what a cache would do with a data set, before anything is trained."""

from hotbed.plan.frequency import hot_keys
from hotbed.plan.optimum import check_fits, optimum, optimum_by_batch
from hotbed.plan.replay import Ahead, Replay, Replayed
from hotbed.plan.simulate import simulate
from hotbed.plan.trace import Trace, read_trace, trace_of

__all__ = [
    "Ahead",
    "Replay",
    "Replayed",
    "Trace",
    "check_fits",
    "hot_keys",
    "optimum",
    "optimum_by_batch",
    "read_trace",
    "simulate",
    "trace_of",
]
