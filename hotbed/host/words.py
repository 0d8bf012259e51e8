"""Loads, stores and turns of values at addresses, for kernels whose memory is Arrow's or a file's, not a numpy array.

No address need be a multiple of anything: values in the pages of a file lie where its headers end.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_typed: Any = intrinsic  # its own type counts the typing context as an argument
_LOADED = {8: "uint8", 32: "int32", 64: "int64"}


def _load(bits: int) -> Any:
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer()), align=1)

        return getattr(types, _LOADED[bits])(types.int64), generate

    return intrinsic(load)


def _store(bits: int) -> Any:
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.store(arguments[1], builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, getattr(types, f"int{bits}")), generate

    return intrinsic(store)


@_typed
def stream32(typing_context: Any, target: Any, source: Any) -> Any:
    """Move 32 bytes past the caches; `target` is a multiple of 32. `settle` makes such bytes seen by others."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.VectorType(ir.IntType(64), 4).as_pointer()
        bytes_of = builder.load(builder.inttoptr(arguments[1], kind), align=1)
        stored = builder.store(bytes_of, builder.inttoptr(arguments[0], kind), align=32)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_typed
def settle(typing_context: Any) -> Any:
    """Everything that was streamed is in memory before anything that follows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _turn(bits: int, to_bits: int) -> Any:
    """Four values at each of four addresses -> one of each, side by side, at four others."""

    def turn(typing_context: Any, a: Any, b: Any, c: Any, d: Any, w: Any, x: Any, y: Any, z: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            source = ir.VectorType(ir.IntType(bits), 4)
            target = ir.VectorType(ir.IntType(to_bits), 4)

            def column(address: Any) -> Any:
                loaded = builder.load(builder.inttoptr(address, source.as_pointer()), align=1)
                return loaded if bits == to_bits else builder.sext(loaded, target)

            def mixed(one: Any, other: Any, order: list[int]) -> Any:
                return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(ir.IntType(32), 4), order))

            a, b, c, d = (column(address) for address in arguments[:4])
            even, odd = [0, 4, 2, 6], [1, 5, 3, 7]
            pairs = [(mixed(a, b, order), mixed(c, d, order)) for order in (even, odd)]
            rows = [mixed(*pair, order) for order in ([0, 1, 4, 5], [2, 3, 6, 7]) for pair in pairs]
            for row, address in zip(rows, arguments[4:]):
                builder.store(row, builder.inttoptr(address, target.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 8), generate

    return intrinsic(turn)


load8, load32, load64 = _load(8), _load(32), _load(64)
store32, store64 = _store(32), _store(64)
turn_numbers, turn_int32, turn_int64 = _turn(32, 32), _turn(32, 64), _turn(64, 64)
