"""hotbed: click-through-rate and recommendation models with embedding tables of any size, exact on every device."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotbed.host.startup import find_kernel_cache, keep_old_names

if TYPE_CHECKING:
    from hotbed import checkpoint, data, errors, export, interop, models, optim
    from hotbed.cli.fit import Run, fit
    from hotbed.data.prepare.prepare import prepare
    from hotbed.embedding_bag import EmbeddingBag
    from hotbed.ids import Admit, Expire
    from hotbed.ops.init_rows import Constant, Normal, Uniform
    from hotbed.parallel.sharded import ShardedTables
    from hotbed.pipeline import prefetch
    from hotbed.scorer import load
    from hotbed.tables.module import EmbeddingTables
    from hotbed.tables.spec import Table
    from hotbed.train.compiled_step import compile_step
    from hotbed.types import Batch, Jagged

if sys.platform != "linux" and "HOTBED_ANY_SYSTEM" not in os.environ:
    raise ImportError(
        f"hotbed runs on Linux, and this is {sys.platform}: its kernels call Linux's C library (preadv2, futex, errno). Use "
        "a Linux machine, a container (the repository has a Dockerfile) or WSL 2. HOTBED_ANY_SYSTEM=1 tries it anyway."
    )

__version__ = "0.1.0"
__all__ = [
    "Admit",
    "Batch",
    "Constant",
    "EmbeddingBag",
    "EmbeddingTables",
    "Expire",
    "Jagged",
    "Normal",
    "Run",
    "ShardedTables",
    "Table",
    "Uniform",
    "checkpoint",
    "compile_step",
    "data",
    "errors",
    "export",
    "fit",
    "interop",
    "load",
    "models",
    "optim",
    "prefetch",
    "prepare",
]

_HOME = {
    "Admit": "hotbed.ids",
    "Batch": "hotbed.types",
    "Constant": "hotbed.ops.init_rows",
    "EmbeddingBag": "hotbed.embedding_bag",
    "EmbeddingTables": "hotbed.tables.module",
    "Expire": "hotbed.ids",
    "Jagged": "hotbed.types",
    "Normal": "hotbed.ops.init_rows",
    "Run": "hotbed.cli.fit",
    "ShardedTables": "hotbed.parallel.sharded",
    "Table": "hotbed.tables.module",
    "Uniform": "hotbed.ops.init_rows",
    "compile_step": "hotbed.train.compiled_step",
    "fit": "hotbed.cli.fit",
    "load": "hotbed.scorer",
    "prefetch": "hotbed.pipeline",
    "prepare": "hotbed.data.prepare.prepare",
}

find_kernel_cache(Path(__file__).parent)
keep_old_names()


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that `hotbed --help` does not wait for torch."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in __all__:
        return importlib.import_module(f"hotbed.{name}")
    raise AttributeError(f"module 'hotbed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
