"""Compiles the Triton kernels for an H200, where there is none: `python -m tests.ops.compile_kernels`.

The interpreter runs what no compiler would take (types that change in a loop, pointers of blocks). Here every launch of the ops
below is compiled to machine code instead of run, so tensors may be anywhere and hold anything. Prints the kernels' names.
"""

from __future__ import annotations

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

import hotbed
from hotbed.cache import make_policy
from hotbed.cache.cache import Cache
from hotbed.cache.recorded_planner import RecordedCache
from hotbed.host.compiling import CompileReport
from hotbed.ops import launch
from hotbed.ops.index import ArrivalCells, Lists, WindowClock
from hotbed.ops.index import triton as index
from hotbed.ops.index.victims import Victims
from hotbed.ops.inputs import Capacity, InputLayout
from hotbed.ops.inputs.triton import Descriptions, count_up, keep
from hotbed.ops.keys import Addresses
from hotbed.ops.keys.triton import make_keys
from hotbed.ops.lookup.triton import lookup
from hotbed.ops.lookups import Bags, IdCheck, Lookups, SortedKeys, Span
from hotbed.ops.move import InitialTable, initial_rows
from hotbed.ops.move.triton import pack, unpack
from hotbed.ops.records import layout_of
from hotbed.ops.shard import Shard
from hotbed.ops.update import settings_of
from hotbed.ops.update.triton import update

_TARGET = GPUTarget("cuda", 90, 32)
_TYPES = {
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}
_CPU = torch.device("cpu")


def _compile(self, grid, key, *arguments, **options):
    """In the place of Launch.__call__."""
    signature, constants = {}, {}
    for parameter, value in zip(self._kernel.params, arguments, strict=True):
        if parameter.is_constexpr or (value is not None and not parameter.do_not_specialize and value == 1) is True:
            signature[parameter.name], constants[parameter.num,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i64" if abs(int(value)) >= 2**31 else "i32"
    source = ASTSource(self._kernel, signature, constants)
    compiled = compile(source, target=_TARGET, options={**self._options, **options})
    assert compiled.asm["cubin"]
    sys.stdout.write(self._kernel.fn.__name__ + "\n")


def zeros(*shape, dtype=torch.int64):
    return torch.zeros(*shape, dtype=dtype)


def compile_index(key_type):
    base = 0 if key_type == torch.int32 else 2**40
    addresses = Addresses(
        np.array([base, base + 10]),
        np.array([10, 10]),
        np.array([False, True]),
        np.array([True, False]),
        zeros(2).numpy(),
    )
    bags = InputLayout(addresses, True, (0, 1), (False, True), True)
    for layout in (InputLayout(addresses, False), bags, bags._replace(is_mapped=True)):
        cache = Cache(64, make_policy("oracle"), _CPU, lists_new=layout.is_bags)
        cache._ops = cache.index._ops = index
        recorded = RecordedCache(cache, Descriptions(layout, _CPU), Capacity(1000, 10), 2)
        recorded._stamps = zeros(cache.parts()[0].key.shape[0], dtype=torch.int32)
        recorded._plan(2, 1000, True)
    cells, slots = cache.parts()
    keys, cells_of, counts, order = zeros(100, dtype=key_type), ArrivalCells(None, None), zeros(8), zeros(100)
    index.arrive(cells, keys, 1, counts)
    index.collect(cells, slots, cells_of, keys, 1, 1, 8, True, 1, zeros(100, dtype=torch.int32), counts)
    index.sweep(cells, 1, counts)
    index.rank(cells, slots, Victims(64, make_policy("oracle"), in_order=False), WindowClock(0, 0, 1, 1, 10), 10)
    index.assign(
        cells, slots, zeros(10, dtype=torch.int32), order, 1, True, Lists(*(zeros(10) for _ in range(5))), counts
    )
    index.place(cells, slots, cells_of, keys, order, counts)
    index.tidy(cells, slots)
    keep(keys, keys, order, [zeros(8, 112, dtype=kind) for kind in (key_type, key_type, torch.int32)], zeros(1))
    make_keys(zeros(10), (Span("a", 0, 5, 2), Span("b", 1, 5, 2)), addresses)
    count_up(zeros(1))


def compile_rows(optimizer):
    layout, num = layout_of(16, optimizer), 5000
    records = zeros(50, layout.width, dtype=torch.float32)
    single = Lookups(zeros(num, dtype=torch.int32), (), num)
    bags = single._replace(
        num_out=100,
        bags=Bags(zeros(101), zeros(100), zeros(num, dtype=torch.float32), zeros(num, dtype=torch.int32)),
        check=IdCheck(zeros(1)),
        sorted=SortedKeys(zeros(num, dtype=torch.int32), zeros(num, dtype=torch.int32)),
    )
    for lookups in (single, bags):
        lookup(records, lookups, 16)
        grad = zeros(lookups.num_out, 16, dtype=torch.float32)
        update(records, layout, grad, lookups, settings_of(optimizer, 1.0, ()))


def compile_moves():
    tables = hotbed.EmbeddingTables({"a": hotbed.Table(100, 6)}, hotbed.optim.Adam(), cache=0.5)
    (group,) = tables.caches
    rows = zeros(10, group.layout.width, dtype=torch.float32)
    pack(group.records, zeros(10), rows, 10)
    columns = InitialTable(0, 5, hotbed.Uniform(0.1), None)
    slices = initial_rows(6, hotbed.optim.Adam(), [columns], shard=Shard(1, 2, by_column=True))
    for first in (group.keyspace.initial, slices):
        unpack(group.records, zeros(10), zeros(10, dtype=torch.int32), rows, zeros(10), first, 10)


if __name__ == "__main__":
    compiled = CompileReport()
    launch.Launch.__call__ = _compile
    for kind in (torch.int32, torch.int64):
        compile_index(kind)
    for row_optimizer in (hotbed.optim.RowwiseAdagrad(), hotbed.optim.Adam()):
        compile_rows(row_optimizer)
    compile_moves()
    sys.stdout.write(f"{compiled.kernels} {compiled.seconds}\n")
