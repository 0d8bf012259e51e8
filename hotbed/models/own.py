"""Users' own models: a class in a user's file or package, trained, scored, served and exported like the others.

    class MyModel(nn.Module):
        def __init__(self, schema, *, hidden: int = 64): ...
        def forward(self, inputs): ...           # logits [B]

How it is named, found and saved: hotbed/models/own_code.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hotbed.errors import ConfigError, HotbedError, ModelError, ShapeError
from hotbed.models.base import Model, ModelSchema
from hotbed.models.own_code import find_own, frame_of
from hotbed.models.sequence import VectorSequence, sequences_in


class ModelInputs(NamedTuple):
    """The inputs of a model for a batch of B samples."""

    vectors: dict[str, Tensor]  # feature -> [B, dim]; several ids are pooled
    dense: Tensor  # [B, N], in the order of ModelSchema.dense
    sequences: Mapping[str, VectorSequence] = MappingProxyType({})  # feature -> vectors [B, T, dim], lengths [B], mask


def build_own(name: str, schema: ModelSchema, options: Mapping[str, Any], kept: Any = None) -> OwnModel:
    """The user's model, wrapped for the rest of hotbed."""
    kind = find_own(name, kept)
    with _report_user_error(kind):
        net = kind(schema, **options)
    _check_state(net)
    return OwnModel(net, schema)


def check_own(name: str, options: Mapping[str, Any], kept: Any = None) -> dict[str, Any]:
    """The options; a ConfigError if the constructor does not take them."""
    kind = find_own(name, kept)
    known = list(inspect.signature(kind).parameters.values())[1:]
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known):
        return dict(options)
    wrong = [option for option in options if option not in {one.name for one in known}]
    if wrong:
        listed = ", ".join(f"{one.name}={one.default!r}" for one in known) or "none"
        raise ConfigError(
            f"{kind.__name__} has no option {', '.join(wrong)}; its constructor takes, after the schema: {listed}."
        )
    missing = [one.name for one in known if one.default is one.empty and one.name not in options]
    if missing:
        raise ConfigError(
            f"{kind.__name__} needs the option {', '.join(missing)}; give --set model.options.{missing[0]}=..."
        )
    return dict(options)


class OwnModel(Model):
    """A user's model with the interface of all models: vectors [B, C, D] are passed by name, logits [B] are checked."""

    reads_sequences = True

    def __init__(self, net: nn.Module, schema: ModelSchema) -> None:
        super().__init__(len(schema.features), schema.dim, len(schema.dense), sequences=schema.sequences)
        self.net, self.features, self.tasks = net, schema.features, schema.tasks
        self._names: set[str] | None = set(net.state_dict())  # until the first call has shown that it adds no parameter

    def logits(self, vectors: Tensor, dense: Tensor, *lengths: Tensor) -> Tensor:
        sequences = sequences_in(vectors, self.sequences, *lengths) if self.sequences else {}
        inputs = ModelInputs(dict(zip(self.features, vectors.unbind(1))), dense, sequences)
        with _report_user_error(type(self.net)):
            found: Tensor | Mapping[str, Tensor] = self.net(inputs)
        by_task = self._by_task(found) if isinstance(found, Mapping) else [found]
        if torch.compiler.is_compiling():  # traced for an export: sizes are symbolic
            traced = [torch.reshape(one, (-1,)) for one in by_task]
            return traced[0] if len(traced) == 1 else torch.stack(traced, dim=1)
        needs_grad = self.training and torch.is_grad_enabled() and vectors.requires_grad
        for one in by_task:
            self._check(one, len(dense), needs_grad=needs_grad)
        outputs = [one.reshape(-1) for one in by_task]
        return outputs[0] if len(outputs) == 1 else torch.stack(outputs, dim=1)

    def _by_task(self, found: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs in the order of the tasks."""
        if not self.tasks or set(found) != set(self.tasks):
            wanted = f"one for each of {', '.join(self.tasks)}" if self.tasks else "a tensor: the data has one label"
            raise ShapeError(
                f"{type(self.net).__name__}.forward returned logits of {', '.join(map(str, found))}; it must return {wanted}."
            )
        return [found[name] for name in self.tasks]

    def _check(self, found: Any, size: int, *, needs_grad: bool) -> None:
        kind = type(self.net).__name__
        fits = isinstance(found, Tensor) and found.numel() == size and found.shape[:1] == (size,)
        if not fits or not found.is_floating_point():
            given = type(found).__name__
            if isinstance(found, Tensor):
                given = f"a tensor of shape {list(found.shape)} and type {found.dtype}"
            raise ShapeError(
                f"{kind}.forward returned {given} for {size} samples; it must return one logit for each: float, [{size}] or "
                f"[{size}, 1]."
            )
        if needs_grad and not found.requires_grad:
            raise ModelError(
                f"{kind}.forward returned logits without a gradient, so nothing would be learned; do not use detach(), item(), "
                "NumPy or torch.no_grad() to compute them."
            )
        if self._names is not None:
            added = sorted(set(self.net.state_dict()) - self._names)
            self._names = None
            if added:
                raise ModelError(
                    f"{kind}.forward added {', '.join(added)} to the model, which would be neither trained nor saved; "
                    "create parameters and buffers in __init__."
                )


def _check_state(net: nn.Module) -> None:
    """Raise if the state of the model cannot be trained or saved."""
    kind = type(net).__name__
    lazy = [name for name, one in net.named_parameters() if is_lazy(one)] + [
        name for name, one in net.named_buffers() if is_lazy(one)
    ]
    if lazy:
        raise ModelError(
            f"{kind} has lazy parameters: {', '.join(lazy)}. Lazy modules are not supported; the "
            "schema has all sizes: len(schema.features) * schema.dim + len(schema.dense)."
        )
    odd = [name for name, one in net.state_dict().items() if not isinstance(one, Tensor) or one.is_complex()]
    if odd:
        raise ModelError(
            f"{kind} has {', '.join(odd)} in its state_dict, but a run can only save tensors of real numbers; use such "
            "parameters or buffers."
        )


@contextmanager
def _report_user_error(kind: type) -> Iterator[None]:
    """Report an error in a user's code with the line of their file."""
    try:
        yield
    except (HotbedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "out of memory" in str(error):
            raise
        where = frame_of(error, inspect.getfile(kind))
        raise ModelError(f"{where}: {type(error).__name__}: {error}") from error
