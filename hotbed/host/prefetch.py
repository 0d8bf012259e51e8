"""`prefetch(records, row, column)`: asks the CPU to load the cache line of records[row, column] before it is needed.

A look-up of a short row in a table far larger than the caches waits about 100 ns for memory; asking some rows ahead hides
most of it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _prefetch(typing_context: Any, records: Any, row: Any, column: Any) -> Any:
    signature = types.void(records, row, column)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type = signature.args[0]
        array = context.make_array(array_type)(context, builder, arguments[0])
        indices = [
            context.cast(builder, value, kind, types.intp) for value, kind in zip(arguments[1:], signature.args[1:])
        ]
        pointer = cgutils.get_item_pointer(context, builder, array_type, array, indices, wraparound=False)
        address = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(function, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return signature, generate


prefetch: Any = intrinsic(_prefetch)
