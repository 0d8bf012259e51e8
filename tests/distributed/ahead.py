"""What every rank imports, loaded once and then forked: importing torch takes seconds. It trains nothing."""

from importlib import import_module

from numba.core.registry import cpu_target

MODULES = (
    "hotbed.train.build",
    "hotbed.checkpoint",
    "hotbed.cli.train",
    "hotbed.data.dataset",
    "hotbed.optim",
    "hotbed.parallel",
    "hotbed.report",
    "hotbed.tables.module",
    "hotbed.train.warm_start",
    "pyarrow.parquet",
    "pytest",
    "safetensors.torch",
    "torch._dynamo",  # the first optimizer that is built loads it
    "torch.distributed",
    "torch.utils.tensorboard",
)
for module in MODULES:
    import_module(module)
cpu_target.typing_context.refresh()  # what Numba knows of Python and NumPy, else loaded at the first call of a kernel
cpu_target.target_context.refresh()
