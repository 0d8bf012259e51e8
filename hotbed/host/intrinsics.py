"""What Numba has no name for: memory at addresses, atomics, hints to the processor, vectors, and calls of the C library.

Kernels take addresses where their memory is Arrow's, a file's or shared between threads, and not a numpy array. Plain loads and
stores need no alignment; atomics are of 64-bit words on a multiple of 8. A numpy array whose address is all that a kernel still
uses must be named once more after that: Numba frees it after its last use, and sees none by address.

Kernels of other files are compiled into their own cache: after an edit here by hand, remove __pycache__ (CONTRIBUTING.md).
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotbed.host.jit import njit

_Address = types.int64
_BYTE, _INT32, _WORD = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_IS_X86 = platform.machine() in ("x86_64", "AMD64")


def _instruction(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """An intrinsic of fixed types; the function decorated takes the builder and the values, and gives the result's value."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def typed(typing_context: Any, *given: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                value = emit(builder, *arguments)
                return context.get_dummy_value() if result is types.void else value

            return result(*parameters), generate

        names = list(inspect.signature(emit).parameters.values())  # a builder, where Numba expects its typing context
        typed.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(typed)

    return decorate


def _at(builder: Any, address: Any, kind: Any = _WORD) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


# Plain memory


def _load(result: Any, kind: Any) -> Any:
    def load(builder: Any, address: Any) -> Any:
        return builder.load(_at(builder, address, kind), align=1)

    return _instruction(result, _Address)(load)


def _store(value: Any, kind: Any) -> Any:
    def store(builder: Any, address: Any, value: Any) -> None:
        builder.store(value, _at(builder, address, kind), align=1)

    return _instruction(types.void, _Address, value)(store)


load8, load32, load64 = _load(types.uint8, _BYTE), _load(types.int32, _INT32), _load(types.int64, _WORD)
store8, store32, store64 = _store(types.uint8, _BYTE), _store(types.int32, _INT32), _store(types.int64, _WORD)
load_unsigned, store_unsigned = _load(types.uint64, _WORD), _store(types.uint64, _WORD)


@_instruction(types.void, _Address, _Address, types.int64)
def copy_bytes(builder: Any, target: Any, source: Any, num_bytes: Any) -> None:
    """memcpy(target, source, num_bytes)."""
    cgutils.raw_memcpy(builder, _at(builder, target, _BYTE), _at(builder, source, _BYTE), num_bytes, 1)


@_instruction(types.voidptr, _Address)
def as_pointer(builder: Any, address: Any) -> Any:
    """For `carray`."""
    return _at(builder, address, _BYTE)


@_instruction(types.void, _Address, _Address, types.int64, types.int64)
def call(builder: Any, function: Any, a: Any, b: Any, c: Any) -> None:
    """Call the C function void(int64, int64, int64) at an address."""
    kind = ir.FunctionType(ir.VoidType(), [_WORD] * 3)
    builder.call(builder.inttoptr(function, kind.as_pointer()), [a, b, c])


# Atomics


@_instruction(types.int64, _Address)
def load_acquire(builder: Any, address: Any) -> Any:
    return builder.load_atomic(_at(builder, address), ordering="acquire", align=8)


@_instruction(types.void, _Address, types.int64)
def store_release(builder: Any, address: Any, value: Any) -> None:
    builder.store_atomic(value, _at(builder, address), ordering="release", align=8)


@_instruction(types.int64, _Address, types.int64)
def fetch_add(builder: Any, address: Any, value: Any) -> Any:
    """What the word was before."""
    return builder.atomic_rmw("add", _at(builder, address), value, "seq_cst")


@_instruction(types.boolean, _Address, types.int64, types.int64)
def compare_swap(builder: Any, address: Any, old: Any, new: Any) -> Any:
    """True if the word was `old` and is `new` now."""
    return builder.extract_value(builder.cmpxchg(_at(builder, address), old, new, "seq_cst"), 1)


@_instruction(types.void)
def fence(builder: Any) -> None:
    """All that was written, also by `stream32`, is in memory before anything that follows."""
    builder.fence("seq_cst")


# Hints, bits


@_instruction(types.void)
def pause(builder: Any) -> None:
    """Spare the other thread of this core while waiting."""
    if _IS_X86:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])


def _emit_prefetch(builder: Any, pointer: Any, level: int = 3) -> None:
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, _INT32(0), _INT32(level), _INT32(1)])


@_instruction(types.void, _Address)
def prefetch_line(builder: Any, address: Any) -> None:
    """Load the cache line of an address before it is needed."""
    _emit_prefetch(builder, _at(builder, address, _BYTE))


@_instruction(types.void, _Address)
def prefetch_far(builder: Any, address: Any) -> None:
    """The same into the second level of the cache, for lines that are needed later."""
    _emit_prefetch(builder, _at(builder, address, _BYTE), 2)


def _prefetch(typing_context: Any, records: Any, row: Any, column: Any) -> Any:
    """Load the cache line of records[row, column] before it is needed.

    A lookup of a short row in a table far larger than the caches waits about 100 ns for memory; asking some rows ahead hides
    most of it.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        indices = [
            context.cast(builder, value, kind, types.intp) for value, kind in zip(arguments[1:], signature.args[1:])
        ]
        item = cgutils.get_item_pointer(context, builder, signature.args[0], array, indices, wraparound=False)
        _emit_prefetch(builder, builder.bitcast(item, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(records, row, column), generate


prefetch: Any = intrinsic(_prefetch)


@_instruction(types.uint64, types.uint64)
def trailing_zeros(builder: Any, word: Any) -> Any:
    return builder.cttz(word, ir.Constant(ir.IntType(1), 0))


# Vectors


@_instruction(types.void, _Address, _Address)
def stream32(builder: Any, target: Any, source: Any) -> None:
    """Move 32 bytes past the caches; `target` is a multiple of 32. `fence` makes such bytes seen by others."""
    vector = ir.VectorType(_WORD, 4)
    stored = builder.store(builder.load(_at(builder, source, vector), align=1), _at(builder, target, vector), align=32)
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT32, 1)]))


def _transpose(kind: Any, to: Any) -> Any:
    """Four values at each of four addresses -> one of each, side by side, at four others."""
    source, target = ir.VectorType(kind, 4), ir.VectorType(to, 4)
    even, odd, low, high = [0, 4, 2, 6], [1, 5, 3, 7], [0, 1, 4, 5], [2, 3, 6, 7]

    def transpose(builder: Any, a: Any, b: Any, c: Any, d: Any, w: Any, x: Any, y: Any, z: Any) -> None:
        def column(address: Any) -> Any:
            loaded = builder.load(_at(builder, address, source), align=1)
            return loaded if kind == to else builder.sext(loaded, target)

        def mixed(one: Any, other: Any, order: list[int]) -> Any:
            return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_INT32, 4), order))

        a, b, c, d = (column(address) for address in (a, b, c, d))
        pairs = [(mixed(a, b, order), mixed(c, d, order)) for order in (even, odd)]
        rows = [mixed(*pair, order) for order in (low, high) for pair in pairs]
        for row, address in zip(rows, (w, x, y, z)):
            builder.store(row, _at(builder, address, target), align=1)

    return _instruction(types.void, *(_Address,) * 8)(transpose)


transpose_4_bytes, transpose_8_bytes = _transpose(_INT32, _INT32), _transpose(_WORD, _WORD)
transpose_int32_to_int64 = _transpose(_INT32, _WORD)


# The C library

EINTR, EIO = 4, 5
SHORT = -1  # of `read_fully`: the file ends before

_int32, _int64 = types.int32, types.int64
syscall: Any = types.ExternalFunction("syscall", _int64(*(_int64,) * 5))
sched_yield: Any = types.ExternalFunction("sched_yield", _int32())
usleep: Any = types.ExternalFunction("usleep", _int32(types.uint32))
preadv2: Any = types.ExternalFunction("preadv2", _int64(_int32, _int64, _int32, _int64, _int32))
posix_fadvise: Any = types.ExternalFunction("posix_fadvise", _int32(_int32, _int64, _int64, _int32))
_pread: Any = types.ExternalFunction("pread", _int64(_int32, _int64, _int64, _int64))
_pwrite: Any = types.ExternalFunction("pwrite", _int64(_int32, _int64, _int64, _int64))
_errno_location: Any = types.ExternalFunction("__errno_location", _int64())


def external(name: str, result: Any, *parameters: Any) -> Any:
    """A C function for kernels; `bind` says which, before the first kernel that calls it is compiled or loaded."""
    return types.ExternalFunction(name, result(*parameters))


def bind(name: str, address: int) -> None:
    llvmlite.binding.add_symbol(name, address)


@njit(nogil=True, cache=True)
def _last_error() -> Any:
    """The errno of this thread."""
    return np.int64(load32(_errno_location()))


@njit(nogil=True, cache=True)
def read_fully(handle: Any, target: Any, num_bytes: Any, offset: Any) -> Any:
    """0, or SHORT at the end of the file, or an errno."""
    done = 0
    while done < num_bytes:  # ends: every read brings bytes, fails, or was interrupted and is repeated
        got = _pread(np.int32(handle), target + done, num_bytes - done, offset + done)
        if got > 0:
            done += got
        elif got == 0:
            return SHORT
        else:
            error = _last_error()
            if error != EINTR:
                return error
    return 0


@njit(nogil=True, cache=True)
def write_fully(handle: Any, source: Any, num_bytes: Any, offset: Any) -> Any:
    """0, or an errno."""
    done = 0
    while done < num_bytes:  # ends: every write takes bytes, fails, or was interrupted and is repeated
        put = _pwrite(np.int32(handle), source + done, num_bytes - done, offset + done)
        if put > 0:
            done += put
        elif put == 0:  # sets no errno
            return EIO
        else:
            error = _last_error()
            if error != EINTR:
                return error
    return 0
