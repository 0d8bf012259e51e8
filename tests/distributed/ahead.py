"""What ranks and programs of the tests import, loaded once and then forked."""

from importlib import import_module

MODULES = (
    "benchmarks.crash.ahead",
    "hotbed.parallel",
    "pytest",
    "torch.distributed",
)
for module in MODULES:
    import_module(module)
