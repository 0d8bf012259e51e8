"""Numba's compiler, with kernels that are kept on disk under what they are made of.

Numba's own cache has three gaps, and each ends in code that is silently not the caller's:

- It looks at the file of a kernel only. A kernel whose callee or constant changed in another file is loaded as it was. Here the
  key holds the code of all that a kernel reaches.
- Two processes that save kernels of one function at the same moment take the same file name, and one finds the other's code.
  Here every saved kernel has a name of its own, and the index is written after it.
- Compiled functions are linked by qualified name and a number that counts in each process. Two closures of one qualified name,
  compiled in two processes under the same number, are taken for one when a third process loads both. Here a function inside
  another one needs a name that says what it closes over.
"""

from __future__ import annotations

import glob
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, overload

import numba
import numpy as np
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic
from numba.core.typing.templates import Signature

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NUMBERS = (int, float, complex, str, bytes, type(None), np.generic)


@overload
def njit(function: _Function, *, name: str = ..., cache: bool = ..., **options: Any) -> _Function: ...
@overload
def njit(*, name: str = ..., cache: bool = ..., **options: Any) -> Callable[[_Function], _Function]: ...
def njit(function: Any = None, *, name: str = "", cache: bool = False, **options: Any) -> Any:
    """numba.njit. `name` replaces the function's own: it has to, where that does not tell the code (in closures)."""
    if function is None:
        return lambda function: njit(function, name=name, cache=cache, **options)
    if name:
        function.__name__, function.__qualname__ = name, name
    elif "<locals>" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} is a closure: njit(name=...) has to tell it from others of its name")
    dispatcher = numba.njit(**options)(function)
    if cache:
        dispatcher._cache = _Kernels(function)
    return dispatcher


def cfunc(signature: Signature, function: Callable[..., Any]) -> Any:
    """numba.cfunc, compiled without Python's lock and kept."""
    callback: Any = CFunc(function, (signature.args, signature.return_type), locals={}, options={"nogil": True})
    callback._cache = _Kernels(function)
    callback.compile()
    return callback


def digest_of(value: Any) -> str:
    """A key for what a value (a function, numbers, a tuple of both) is made of, with all that its code reaches by name."""
    digest = hashlib.sha256()
    for part in _parts(value, (), set()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _parts(value: Any, names: tuple[str, ...], seen: set[int]) -> Iterator[bytes]:
    """What `value` is made of; names: what the code that holds it asks for, of a module its attributes."""
    if isinstance(value, _NUMBERS):
        yield f"{type(value).__name__} {value!r}".encode()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, tuple):
        for one in value:
            yield from _parts(one, names, seen)
    elif isinstance(value, Dispatcher):
        yield repr(sorted(value.targetoptions.items())).encode()
        yield from _function_parts(value.py_func, seen)
    elif isinstance(value, _Intrinsic):
        yield from _function_parts(value._defn, seen)
    elif isinstance(value, ModuleType) and not _is_known(value.__name__):
        for name in names:
            yield from _parts(vars(value).get(name), names, seen)
    elif isinstance(value, FunctionType) and not _is_known(value.__module__):
        if os.path.exists(value.__code__.co_filename):  # an overload may stand beside it
            yield Path(value.__code__.co_filename).read_bytes()
        yield from _function_parts(value, seen)
    else:  # a type, a function of NumPy's, or what a kernel cannot hold
        yield f"{getattr(value, '__module__', '')} {getattr(value, '__qualname__', type(value).__qualname__)}".encode()


def _is_known(module: str | None) -> bool:
    """Whether Numba compiles its functions by itself."""
    return (module or "").partition(".")[0] in ("math", "numba", "numpy")


def _function_parts(function: FunctionType, seen: set[int]) -> Iterator[bytes]:
    if id(function) in seen:
        return
    seen.add(id(function))
    codes = list(_codes(function.__code__))
    names = tuple(sorted({name for code in codes for name in code.co_names}))
    for code in codes:
        yield code.co_code
        for constant in code.co_consts:
            if not isinstance(constant, CodeType):
                yield repr(constant).encode()
    for name in names:
        yield name.encode()
        if name in function.__globals__:
            yield from _parts(function.__globals__[name], names, seen)
    for cell in function.__closure__ or ():
        yield from _parts(cell.cell_contents, names, seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


class _Kernels(FunctionCache):
    """The compiled kernels of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        base, stamp = self._impl.filename_base, self._impl.locator.get_source_stamp()
        self._cache_file = _KernelFiles(cache_path=self._cache_path, filename_base=base, source_stamp=stamp)
        self._digest = ""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        self._digest = self._digest or digest_of(self._py_func)  # not before: what it reaches may be defined after it
        return sig, codegen.magic_tuple(), self._digest


class _KernelFiles(IndexDataCacheFile):
    """Their files: the index, and one for each kernel under a name that no other process takes."""

    def save(self, key: Any, data: Any) -> None:
        kernels = self._load_index()
        if not kernels:  # what an older source left is not asked for any more
            for path in glob.glob(glob.escape(os.path.join(self._cache_path, self._index_name[:-4])) + ".*.nbc"):
                Path(path).unlink(missing_ok=True)
        name = f"{self._index_name[:-4]}.{uuid.uuid4().hex[:16]}.nbc"
        self._save_data(name, data)
        self._save_index({**kernels, key: name})
