"""Row optimizers, learning-rate schedules, and k-step Adam for dense weights."""

from hotbed.optim.kstep.optimizer import KStepAdam
from hotbed.optim.row import FTRL, ROW_OPTIMIZERS, SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad, row_optimizer
from hotbed.optim.schedules import SCHEDULES, Cosine, Decay, Fixed, Schedule, Warmup

__all__ = [
    "FTRL",
    "ROW_OPTIMIZERS",
    "SCHEDULES",
    "SGD",
    "Adagrad",
    "Adam",
    "Cosine",
    "Decay",
    "Fixed",
    "KStepAdam",
    "RowOptimizer",
    "RowwiseAdagrad",
    "Schedule",
    "Warmup",
    "row_optimizer",
]
