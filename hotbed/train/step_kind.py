"""What a recorded step depends on: steps of one kind do the same in Python, so a recording of one holds for all of them.

The Python code of a step reads the model, the optimizer and the loss function. They are followed through attributes,
containers, closures and the global variables that functions name. Simple values count by value, tensors by their memory,
all else by identity. The walk takes milliseconds, so it is repeated only where one of the objects that it found has been
replaced; that is seen in 30 us for thirty modules. Objects of torch itself and hotbed's tables are not entered.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import chain, count
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as _modules
from torch.optim import optimizer as _optimizers

from hotbed.tables.module import EmbeddingTables

SIMPLE = (bool, int, float, str, type(None))
_VALUES = (*SIMPLE, bytes, np.generic, torch.dtype, torch.device)
_MOST = 20_000  # objects that are compared in every step
_KEPT = 64  # states of the Python objects that have a number
_CODE = (type, ModuleType, BuiltinFunctionType, FunctionType)
_OPAQUE = (ModuleType, BuiltinFunctionType, EmbeddingTables)
_GLOBAL_HOOKS = [
    *(getattr(_modules, f"_global_{name}_hooks") for name in ("forward", "forward_pre", "backward", "backward_pre")),
    _optimizers._global_optimizer_pre_hooks,
    _optimizers._global_optimizer_post_hooks,
]


class NotRecordableError(Exception):
    """Why a step is not recorded."""


class PythonState:
    """All objects that can be followed from some roots, as they are now, with a number for each state they were in."""

    def __init__(self, **roots: Any) -> None:
        self._roots = {**roots, "hooks": _GLOBAL_HOOKS}
        self._numbers: dict[Any, tuple[int, list[Any]]] = {}  # with the objects, so that nothing else gets their ids
        self._next = count()
        self.walk()

    def key(self) -> tuple[Any, ...]:
        """The state of the objects, and the memory of all tensors among them."""
        if not self._holds():
            self.walk()
        return (
            self._number,
            tuple([one.data_ptr() for one in self._tensors]),
            tuple([one.requires_grad for one in self._learned]),
            tuple([not one._backward_hooks for one in self._learned]),
        )

    def facts(self) -> dict[str, Any]:
        """By path: a value, the memory of a tensor, the id of anything else."""
        self.walk()
        memory = {path: (*self._facts[path], one.data_ptr()) for path, one in zip(self._paths, self._tensors)}
        return {_readable(path): fact for path, fact in {**self._facts, **memory}.items()}

    def _holds(self) -> bool:
        same = list(map(len, self._views)) == self._lengths and not any(map(len, self._empty))
        return same and all(map(operator.is_, chain.from_iterable(self._views), self._held))

    def walk(self) -> None:
        """Find them all again."""
        self._views: list[Collection[Any]] = []
        self._tensors: list[Tensor] = []
        self._paths: list[str] = []  # of the tensors
        self._facts: dict[str, Any] = {}
        opaque: list[Any] = []
        paths: dict[int, str] = {}
        todo = deque(self._roots.items())
        while todo:
            path, value = todo.popleft()
            first = path if isinstance(value, _VALUES) else paths.setdefault(id(value), path)
            parts = None if first != path or isinstance(value, (Tensor, *_VALUES)) else _parts_of(value)
            if isinstance(value, _VALUES):
                self._facts[path] = type(value), value
            elif first != path:
                self._facts[path] = "the same as", first
            elif isinstance(value, Tensor) and value.layout == torch.strided:
                self._facts[path] = value.shape, value.stride(), value.dtype, value.device
                self._tensors.append(value)
                self._paths.append(path)
            elif parts is None:
                self._facts[path] = type(value), id(value)
                opaque.append(value)
            else:
                self._facts[path] = value.__code__ if isinstance(value, FunctionType) else type(value)
                self._views.append(parts[0])
                todo.extend((f"{path}.{name}", part) for name, part in parts[1])
                if len(todo) + len(paths) > _MOST:
                    raise NotRecordableError(f"the model, the optimizer and the loss hold more than {_MOST:,} objects")
        self._learned = [
            one for one, path in zip(self._tensors, self._paths) if not path.startswith("optimizer.state.")
        ]
        self._empty = [view for view in self._views if not len(view)]
        self._views = [view for view in self._views if len(view)]
        self._lengths = list(map(len, self._views))
        self._held = list(chain.from_iterable(self._views))
        key = tuple(self._facts.items())
        if key not in self._numbers:
            while len(self._numbers) >= _KEPT:
                del self._numbers[next(iter(self._numbers))]
            self._numbers[key] = next(self._next), opaque
        self._number = self._numbers[key][0]


class _OuterVariables(Collection[Any]):
    """The variables that a function names and that hold data: of its closure, global ones, those of modules."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = function.__closure__ or ()
        space, words = function.__globals__, function.__code__.co_names
        spaces = [space, *(vars(space[word]) for word in words if isinstance(space.get(word), ModuleType))]
        self._places = [
            (one, word)
            for one in spaces
            for word in words
            if word in one
            and not _is_ours(one.get("__name__"))
            and not isinstance(one[word], (*_CODE, EmbeddingTables))
        ]
        self.names = [*function.__code__.co_freevars, *(word for _, word in self._places)]
        called = [(word, space[word]) for word in words if word in space]
        self.functions = [(word, one) for word, one in called if getattr(one, "__globals__", None) is space]

    def __iter__(self) -> Iterator[Any]:
        for cell in self._cells:
            try:
                yield cell.cell_contents
            except ValueError:  # not bound yet
                yield None
        for space, word in self._places:
            yield space.get(word)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, value: object) -> bool:
        return any(one is value for one in self)


class _Settings(Collection[Any]):
    """Settings of an optimizer's group, except a learning rate that a recording reads again in every step."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group

    def items(self) -> Iterator[tuple[str, Any]]:
        for name, value in self._group.items():
            if name != "lr" or not has_live_rate(self._group):
                yield name, value

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in self.items())

    def __len__(self) -> int:
        return len(self._group)

    def __contains__(self, value: object) -> bool:
        return any(one is value for one in self)


def _readable(path: str) -> str:
    """As users write it: `model.layers.0.p`."""
    for name in ("_modules", "_parameters", "_buffers"):
        path = path.replace(f".{name}.", ".")
    return path


def has_live_rate(group: dict[str, Any]) -> bool:
    """Whether a recording reads the learning rate of a group anew in every step."""
    return bool(group.get("fused")) and isinstance(group["lr"], (int, float))


def _parts_of(value: Any) -> tuple[Collection[Any], list[tuple[Any, Any]]] | None:
    """A live view of what an object holds, and its parts by name; None for one that is not entered."""
    if isinstance(value, _OPAQUE):
        return None
    if isinstance(value, dict):
        if "params" in value and "lr" in value:
            settings = _Settings(value)
            return settings, list(settings.items())
        return value.values(), [
            (name if isinstance(name, str) else i, one) for i, (name, one) in enumerate(value.items())
        ]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value, list(enumerate(value))
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__), [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, partial):
        return (value,), [("function", value.func), ("arguments", value.args), ("keywords", value.keywords)]
    if isinstance(value, (FunctionType, type)):
        if _is_ours(value.__module__):
            return None
        if isinstance(value, type):
            return vars(value).values(), [(name, one) for name, one in vars(value).items() if not name.startswith("__")]
        outside = _OuterVariables(value)
        return outside, [*zip(outside.names, outside), *outside.functions]
    is_known = isinstance(value, (nn.Module, torch.optim.Optimizer))
    if not hasattr(value, "__dict__") or (_is_ours(type(value).__module__) and not is_known):
        return None
    parts = [
        (name, one) for name, one in vars(value).items() if "state_dict" not in name
    ]  # those hooks are not of steps
    kinds = type(value).__mro__[:-1] if isinstance(value, nn.Module) else ()
    return vars(value).values(), [*parts, *((f"({kind.__name__})", kind) for kind in kinds)]


def _is_ours(module: Any) -> bool:
    """Whether code of a module is torch's or hotbed's own, which keeps no numbers outside of objects."""
    return str(module).partition(".")[0] in ("torch", "hotbed", "builtins", "typing", "abc")


def shape_of(place: int, value: Any, device: torch.device) -> Any:
    """All of an input (0: of vectors) that a recording holds for; an error for one that cannot be copied into its memory."""
    if not isinstance(value, Tensor):
        if isinstance(value, SIMPLE):
            return type(value), value
        raise NotRecordableError(
            f"{_called(place)} is a {type(value).__name__}; give its tensors as inputs of their own"
        )
    if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
        raise NotRecordableError(
            f"{_called(place)} is a {type(value).__name__} of layout {value.layout}, not a plain tensor"
        )
    if value.device != device:
        raise NotRecordableError(f"{_called(place)} is on {value.device}, not on {device}; move it before the step")
    if place and value.requires_grad:
        raise NotRecordableError(
            f"{_called(place)} requires a gradient, which only vectors and weights of the optimizer get"
        )
    stride = value.stride()
    if 0 in stride and value.numel() and any(not step and size > 1 for step, size in zip(stride, value.shape)):
        raise NotRecordableError(f"{_called(place)} is expanded; call .contiguous() on it before the step")
    return value.shape, stride, value.dtype, value.requires_grad


def _called(place: int) -> str:
    return f"input {place}" if place else "a tensor of vectors"


def torch_settings() -> tuple[Any, ...]:
    """Settings of torch that choose kernels, or whether there are gradients."""
    return (
        torch.is_grad_enabled(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
    )


def tensors_of(vectors: Tensor | Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of one lookup."""
    return list(vectors.values()) if isinstance(vectors, Mapping) else [vectors]
