"""Triton's interpreter without what it works out again at every launch and for every tensor: two thirds of its time.

Kernels take the same steps with the same numbers. Kept is only what depends on nothing but the language, a type or a shape.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

VERSION = "3.6."  # what is replaced here is not Triton's interface


def install() -> None:
    """Once in a process, before the first launch; nothing where Triton is of another version."""
    import triton

    if triton.__version__.startswith(VERSION):
        from triton.language import core, semantic
        from triton.runtime import interpreter

        _patch_once(interpreter, core)
        _keep_numpy_types(interpreter, core)
        _keep_shapes(core)
        _make_types_when_asked(core)
        _compare_at_a_glance(core, semantic)
        _check_nothing_that_nobody_hears_of(interpreter)
        _keep_arguments(interpreter)


def _patch_once(interpreter: ModuleType, core: ModuleType) -> None:
    """The language is made that of the interpreter for good, and not at each launch and each call of a kernel's function."""
    import triton.language

    for module in (triton.language, core):
        interpreter._patch_lang(SimpleNamespace(__globals__={"language": module}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


def _keep_numpy_types(interpreter: ModuleType, core: ModuleType) -> None:
    find, kept = interpreter._get_np_dtype, dict[str, Any]()

    def found(dtype: Any) -> Any:
        if isinstance(dtype, core.pointer_type):
            return find(dtype)
        scalar = dtype.scalar
        if scalar.name not in kept:
            kept[scalar.name] = find(dtype)
        return kept[scalar.name]

    interpreter._get_np_dtype = found


def _keep_shapes(core: ModuleType) -> None:
    """Of block types and tensors: nobody changes them."""
    of_types, of_tensors = dict[Any, Any](), dict[Any, Any]()
    make = core.block_type.__init__

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([n.value if isinstance(n, core.constexpr) else n for n in shape])
        if key not in of_types:
            make(self, element_ty, shape)
            of_types[key] = self.shape, self.numel
        self.element_ty, (self.shape, self.numel) = element_ty, of_types[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in of_tensors:
            of_tensors[key] = core.tuple([core.constexpr(n) for n in key]), core.constexpr(_product(key))
        self.shape, self.numel = of_tensors[key]

    core.block_type.__init__ = init_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None)
    core.tensor.__init__ = init_tensor


def _product(numbers: tuple[int, ...]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _make_types_when_asked(core: ModuleType) -> None:
    """Of tuples, which nearly nobody asks for."""
    find = core.tuple.__getattr__

    def init(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def get(self: Any, name: str) -> Any:
        if name != "type":
            return find(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    core.tuple.__init__, core.tuple.__getattr__ = init, get


def _compare_at_a_glance(core: ModuleType, semantic: ModuleType) -> None:
    """Most types and shapes that are compared are one object, and most values no constants in disguise."""
    equal, unwrap, broadcast = (
        core.dtype.__eq__,
        core._unwrap_if_constexpr,
        semantic.TritonSemantic.broadcast_impl_value,
    )
    nested = (list, builtins.tuple, core.tuple)

    def same(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def unwrapped(value: Any) -> Any:
        if isinstance(value, core.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, nested) else value

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape is other.shape:  # see _keep_shapes
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.dtype.__eq__, core._unwrap_if_constexpr = same, unwrapped
    semantic.TritonSemantic.broadcast_impl_value = broadcasted


def _check_nothing_that_nobody_hears_of(interpreter: ModuleType) -> None:
    """Sums of int32 are made again in int64 to see whether they overflow, for an assertion that only `debug` switches on."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _keep_arguments(interpreter: ModuleType) -> None:
    """Of a kernel: their names are asked for at every launch."""
    kept = functools.cache(inspect.getfullargspec)

    def bound(function: Any, *args: Any, **named: Any) -> dict[str, Any]:
        names = kept(function).args
        found = dict(zip(names, args)) | named
        if len(args) + len(named) == len(found) == len(names):
            return found
        return inspect.getcallargs(function, *args, **named)  # defaults, or what is wrong

    asked = SimpleNamespace(**vars(inspect))
    asked.getfullargspec, asked.getcallargs = kept, bound
    interpreter.inspect = asked
