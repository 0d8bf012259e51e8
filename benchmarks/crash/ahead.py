"""What a process of hotbed imports and the kernels it calls, loaded once and then forked: a process takes seconds otherwise.

The forked processes must find no thread that is gone: only tables are trained here, by one thread, without a look-ahead. A
torch for CUDA starts a thread for every GPU at its first backward pass, and refuses to train in what is forked after it: with
such a torch nothing is trained here.
"""

import gc
from contextlib import suppress
from importlib import import_module

import torch
from numba.core.registry import cpu_target

from hotbed import EmbeddingTables, Jagged, ShardedTables, Table, optim

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


def load_kernels() -> None:
    """Those of preset and dynamic ids, single and in bags, of one rank and of several, in the cache and below it."""
    if torch.version.cuda is not None:
        return
    ids = torch.arange(6)
    bags = Jagged(ids, torch.tensor([0, 1, 3, 6]))
    for optimizer in (optim.Adagrad(), optim.Adam(), optim.SGD(), optim.RowwiseAdagrad(), optim.FTRL()):
        for rows, budgets in ((40, {}), (40, {"cache": 0.5}), (None, {"hbm": "24KiB", "memory": "1MiB"})):
            for kind in (EmbeddingTables, ShardedTables):
                tables = kind({"a": Table(rows, 4), "b": Table(rows, 4, pooling="mean")}, optimizer, **budgets)
                for inputs in ({"a": ids, "b": ids + 1}, {"a": bags, "b": bags}):
                    tables(inputs).sum().backward()
                tables.rows("a")


_num_threads = torch.get_num_threads()
torch.set_num_threads(1)  # threads of OpenMP do not outlive a fork, and a fork waits for them
load_kernels()
torch.set_num_threads(_num_threads)
gc.collect()
gc.freeze()  # else the collector of every fork writes to all pages
