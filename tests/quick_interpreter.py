"""Triton's interpreter without what it works out again at every launch and for every tensor: half of its time.

Kernels take the same steps with the same numbers. Kept is only what depends on nothing but the language, a type or a shape.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

VERSION = "3.6."  # what is replaced here is not Triton's interface


def install() -> None:
    """Once in a process, before the first launch; nothing where Triton is of another version."""
    import triton

    if triton.__version__.startswith(VERSION):
        from triton.language import core
        from triton.runtime import interpreter

        _patch_once(interpreter, core)
        _keep_numpy_types(interpreter, core)
        _keep_shapes(core)
        _make_types_when_asked(core)


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
