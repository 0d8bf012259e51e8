"""Numba's compiler, with kernels that are kept on disk under what they are made of.

Numba's own cache has gaps, and most of them end in code that is silently not the caller's:

- It looks at the file of a kernel only. A kernel whose callee or constant changed in another file is loaded as it was, and so
  is one of the same function with other options. Here the key holds the code of all that a kernel reaches, and its options.
- Two processes that save kernels of one function at the same moment take the same file name, and one finds the other's code.
  Here every saved kernel has a name of its own, and the index is written after it.
- A file that was cut short, or a disk that is full, is an error in the call of a kernel. Here it is compiled again.
- Compiled functions are linked by qualified name and a number that counts in each process. Two closures of one qualified name,
  compiled in two processes under the same number, are taken for one when a third process loads both. Here a function inside
  another one needs a name that says what it closes over.
"""

from __future__ import annotations

import glob
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, overload

import numba
import numpy as np
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic
from numba.core.types import Type
from numba.core.typing.templates import Signature

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NUMBERS = (int, float, complex, str, bytes, type(None), np.generic)


@overload
def njit(function: _Function, *, name: str = ..., cache: bool = ..., **options: Any) -> _Function: ...
@overload
def njit(*, name: str = ..., cache: bool = ..., **options: Any) -> Callable[[_Function], _Function]: ...
def njit(function: Any = None, *, name: str = "", cache: bool = False, **options: Any) -> Any:
    """numba.njit. `name` replaces the function's own: required where that is ambiguous (in closures)."""
    if function is None:
        return lambda function: njit(function, name=name, cache=cache, **options)
    if name:
        function.__name__, function.__qualname__ = name, name
    elif "<locals>" in function.__qualname__:
        raise TypeError(
            f"{function.__qualname__} is a closure: njit(name=...) has to distinguish it from others of its name"
        )
    dispatcher = numba.njit(**options)(function)
    if cache:
        dispatcher._cache = _cache_of(function, dispatcher.targetoptions)
    return dispatcher


def cfunc(signature: Signature, function: Callable[..., Any]) -> Any:
    """numba.cfunc, compiled without Python's lock and kept."""
    options = {"nogil": True}
    callback: Any = CFunc(function, (signature.args, signature.return_type), locals={}, options=options)
    callback._cache = _cache_of(function, options)
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
    elif isinstance(value, (Type, np.dtype)):
        yield f"type {value}".encode()
    elif isinstance(value, tuple):
        yield f"{type(value).__qualname__} {len(value)}".encode()
        for one in value:
            yield from _parts(one, names, seen)
    elif isinstance(value, Dispatcher):
        yield _shown(value.targetoptions)
        yield from _function_parts(value.py_func, seen)
    elif isinstance(value, _Intrinsic):
        yield from _function_parts(value._defn, seen)
    elif isinstance(value, ModuleType) and not _is_known(value.__name__):
        for name in names:
            yield from _parts(vars(value).get(name), names, seen)
    elif isinstance(value, FunctionType) and not _is_known(value.__module__):
        if os.path.exists(value.__code__.co_filename):  # an overload may stand next to it
            yield Path(value.__code__.co_filename).read_bytes()
        yield from _function_parts(value, seen)
    else:  # a type, a function of NumPy's, or what a kernel cannot hold
        if isinstance(value, type):
            members = [f"{one.name} {one.value!r}" for one in value] if issubclass(value, Enum) else ()
            yield repr((getattr(value, "_fields", ()), members)).encode()
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
    yield from _parts((function.__defaults__, *(function.__kwdefaults__ or {}).items()), names, seen)
    for cell in function.__closure__ or ():
        yield from _parts(cell.cell_contents, names, seen)


def _shown(options: Mapping[str, Any]) -> bytes:
    return repr(sorted((name, str(value)) for name, value in options.items())).encode()


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _cache_of(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Where the kernels of a function are kept; nowhere if no folder can be written to."""
    try:
        return _Kernels(function, options)
    except RuntimeError:  # Numba has tried the folder of the code and those of the user
        return NullCache()


class _Kernels(FunctionCache):
    """The compiled kernels of one function, with one set of options."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        super().__init__(function)
        self._options = _shown(options).decode()
        base, stamp = self._impl.filename_base, self._impl.locator.get_source_stamp()
        self._cache_file = _KernelFiles(cache_path=self._cache_path, filename_base=base, source_stamp=stamp)
        self._digest = ""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        self._digest = self._digest or digest_of(self._py_func)  # not before: what it reaches may be defined after it
        return sig, codegen.magic_tuple(), self._digest, self._options

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # a full disk or a folder that was closed: the kernel is here all the same
            super().save_overload(sig, data)


class _KernelFiles(IndexDataCacheFile):
    """Their files: the index, and one for each kernel under a name that no other process takes."""

    def load(self, key: Any) -> Any:
        try:
            return super().load(key)
        except Exception:  # what a pickle that was cut short raises can be anything
            return None

    def _load_index(self) -> dict[Any, str]:
        try:
            kernels: dict[Any, str] = super()._load_index()
            return kernels
        except Exception:
            return {}

    def save(self, key: Any, data: Any) -> None:
        kernels = self._load_index()
        if not kernels:  # what an older source left is not used any more
            for path in glob.glob(glob.escape(os.path.join(self._cache_path, self._index_name[:-4])) + ".*.nbc"):
                Path(path).unlink(missing_ok=True)
        name = f"{self._index_name[:-4]}.{uuid.uuid4().hex[:16]}.nbc"
        self._save_data(name, data)
        self._save_index({**kernels, key: name})
        if key in kernels:  # a damaged one, or that of another process which compiled it at the same time
            Path(self._cache_path, kernels[key]).unlink(missing_ok=True)
