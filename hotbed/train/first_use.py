"""Tables and dataset in; the compiled code that reads and trains is there before the clock of a run starts.

Numba compiles a kernel once on a machine, which takes seconds, and loads it once in a process: 0.2 s for those of a step and
0.1 s for those of the reader, where a whole run on a small log takes half a second. In the first step that time would count as
training, and the reported speed would be wrong. So a row group that is not trained on is read before it, and some steps go over
tables of a few rows; behind a cache, rows leave and come back. Kernels of CUDA depend on the sizes they meet, and are left to
the first steps; the modules that hold them, and Triton, are imported before. Memory below a cache is there before it, too, as
that of whole tables is: else the first 50 steps of the demo wait up to 0.6 s for its pages.
"""

from __future__ import annotations

import dataclasses
from contextlib import closing, suppress
from importlib import import_module

import torch
from torch import Tensor

from hotbed.cache import DEFAULT_POLICY
from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.data.schema import Schema
from hotbed.host.memory import available_memory
from hotbed.tables.module import EmbeddingTables
from hotbed.types import Jagged

_FEW, _AT_ONCE = 12, 3  # rows of a table, and of a batch at most
_SHARE = 0.5  # of the rows in the cache: two batches fill it, the third lets rows go
_CUDA_MODULES = (
    "cache.recorded_planner",
    "ops.move.compiled_transfer",
    *(f"ops.{op}.triton" for op in ("index", "inputs", "keys", "lookup", "move", "update")),
)
_MOST_PAGES, _PAGES_SHARE = 1 << 30, 8  # bytes of memory that are made ready, and the share of what there is
_loaded: set[object] = set()  # kinds of tables whose code is there, and the reader


def make_pages(tables: EmbeddingTables) -> None:
    """Have the memory of rows below a cache on the CPU, where it is little."""
    available = available_memory(tables.device)
    for rows in tables.caches:
        rows.make_pages(_MOST_PAGES if available is None else min(_MOST_PAGES, available // _PAGES_SHARE))


def load_reader(dataset: Dataset) -> None:
    """Read a row group of a split that is held out, shuffled as in training; nothing where all rows are trained on."""
    held_out = [split for split in dataset.schema.splits if split != "train"]
    if held_out and "reader" not in _loaded:
        with closing(
            Loader(dataset, held_out[0], batch_size=64, shuffle=True, shuffle_rows=1, threads=1).epoch(0)
        ) as read:
            next(read, None)
        _loaded.add("reader")


def load_cuda(device: torch.device) -> None:
    """What training on CUDA would import and set up in its first steps: 0.6 s on the host of an H200."""
    for name in _CUDA_MODULES:
        import_module(f"hotbed.{name}")
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()  # reads all of Triton's own files, once in a process
    with torch.cuda.device(device):
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]


def load_kernels(tables: EmbeddingTables, schema: Schema) -> None:
    """Train a twin of the tables with few rows; nothing where that is not possible or was done before."""
    is_cached = bool(tables.caches)
    has_bags = any(feature.multi for feature in schema.features)
    kind = (type(tables.optimizer), is_cached, has_bags)
    is_plain = all(group.weight_type == torch.float32 for group in tables.groups) and not tables.is_shared
    if kind in _loaded or not is_plain or any(table.rows is None for table in tables.tables.values()):
        return
    small = {
        name: dataclasses.replace(table, rows=_FEW, hashing=True, padding_id=None)
        for name, table in tables.tables.items()
    }
    policy = tables.caches[0].cache.policy.name if is_cached else DEFAULT_POLICY
    share = _SHARE if is_cached else None
    twin = EmbeddingTables(small, tables.optimizer, output=tables.output, cache=share, policy=policy)
    for first in range(0, _FEW, _AT_ONCE) if is_cached else (0,):
        found = twin(*_ids(schema, first))
        vectors = [found] if isinstance(found, Tensor) else [*found.values()]
        torch.stack([one.square().mean() for one in vectors]).sum().backward()  # type: ignore[no-untyped-call]
    _loaded.add(kind)


def _ids(schema: Schema, first: int) -> tuple[Tensor, dict[str, Jagged]]:
    """Two samples, whose ids are `first` and the two after it."""
    single = [feature for feature in schema.features if not feature.multi]
    offsets = torch.tensor([0, 1, 3], device="cpu")
    ids = first + torch.arange(_AT_ONCE, device="cpu")
    bags = {one.name: Jagged(ids, offsets) for one in schema.features if one.multi}
    return torch.full((2, len(single)), first, dtype=torch.int64, device="cpu"), bags
