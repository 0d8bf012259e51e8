"""Everything that a process of hotbed imports, loaded once and then forked: importing takes seconds. It trains nothing."""

from contextlib import suppress
from importlib import import_module

from numba.core.registry import cpu_target

MODULES = (
    "benchmarks.crash.stages",
    "hotbed.cli.checkpoint",
    "hotbed.cli.plan",
    "hotbed.cli.train",
    "hotbed.data.dataset",
    "hotbed.ops.index.numba",
    "hotbed.ops.init_rows.numba",
    "hotbed.ops.keys.numba",
    "hotbed.ops.lookup.numba",
    "hotbed.ops.move.numba",
    "hotbed.ops.precision.numba",
    "hotbed.ops.update.numba",
    "hotbed.report",
    "hotbed.train.build",
    "hotbed.train.run",
    "hotbed.train.warm_start",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "safetensors.torch",
    "torch._dynamo",
    "torch.utils.tensorboard",
)
for module in MODULES:
    import_module(module)
with suppress(ImportError):
    import_module("typer._adapters")  # typer loads it with pydantic at the first command: 0.2 s
cpu_target.typing_context.refresh()  # what Numba knows of Python and NumPy, else loaded at the first call of a kernel
cpu_target.target_context.refresh()
