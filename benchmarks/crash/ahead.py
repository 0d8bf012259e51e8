"""Everything that a process of hotbed imports, loaded once and then forked: importing takes seconds. It trains nothing."""

from importlib import import_module

from numba.core.registry import cpu_target

MODULES = (
    "benchmarks.crash.stages",
    "hotbed.train.build",
    "hotbed.cli.checkpoint",
    "hotbed.cli.train",
    "hotbed.data.dataset",
    "hotbed.report",
    "hotbed.train.run",
    "hotbed.train.warm_start",
    "pyarrow.parquet",
    "safetensors.torch",
    "torch._dynamo",
    "torch.utils.tensorboard",
)
for module in MODULES:
    import_module(module)
cpu_target.typing_context.refresh()  # what Numba knows of Python and NumPy, else loaded at the first call of a kernel
cpu_target.target_context.refresh()
