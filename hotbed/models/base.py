"""The interface of all models: vectors and dense features in, one logit per sample out.

A model knows nothing of tables, devices or caches; it only says how wide the vectors must be. A model with first-order id
weights asks for one more column and reads the weight there, so that one record holds both.

Shapes: B samples, F pooled id features, S sequences of at most T_1, ..., T_S ids, C = F + T_1 + ... + T_S columns of the block
(models/sequence.py), W vector width (what the tables hold), D = dim, N dense features.

A model's options are the keyword arguments of its constructor; their annotations carry the limits. `check_options`:
values of a run file or the command line in, values of the right type out, or one ConfigError with every mistake.
"""

from __future__ import annotations

import difflib
import inspect
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from torch import Tensor, nn

from hotbed.errors import ConfigError, ShapeError


class ModelSchema(NamedTuple):
    """What a model knows about its data when it is built."""

    features: tuple[str, ...]  # id features, one vector each
    dim: int  # of every vector
    dense: tuple[str, ...]  # number features
    sequences: Mapping[str, int] = types.MappingProxyType({})  # sequence features -> their greatest length
    tasks: tuple[str, ...] = ()  # names of all labels, where there are several; the first is that of `--label`


class Model(nn.Module):
    """Base of all models: checks the shapes, then calls `logits`."""

    __call__: Callable[..., Tensor]
    logits: Callable[
        ..., Tensor
    ]  # (vectors, dense), with sequences also their lengths -> the score before the sigmoid [B]
    reads_sequences: ClassVar[bool] = False  # else a sequence is pooled like a bag

    def __init__(
        self, num_features: int, dim: int, num_dense: int, *, sequences: Mapping[str, int] | None = None
    ) -> None:
        super().__init__()
        least = 0 if sequences else 1
        for name, value, low in (("num_features", num_features, least), ("dim", dim, 1), ("num_dense", num_dense, 0)):
            if value < low:
                raise ConfigError(f"{type(self).__name__}: {name} is {value}; it must be at least {low}.")
        self.num_features = num_features
        self.sequences = dict(sequences or {})  # sequence feature -> its greatest length
        self.dim = dim
        self.num_dense = num_dense

    @staticmethod
    def vector_width(dim: int) -> int:
        """W, the width of the table rows that a model of this dim reads; one more with first-order weights."""
        return dim

    @property
    def num_columns(self) -> int:
        """C, the vectors that it reads of a sample."""
        return self.num_features + sum(self.sequences.values())

    def forward(self, vectors: Tensor, dense: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits [B] from vectors [B, C, W], dense features [B, N] and, with sequences, their lengths [B, S]."""
        width = self.vector_width(self.dim)
        if vectors.dim() != 3 or vectors.shape[1:] != (self.num_columns, width):
            of = f" and sequences of {', '.join(map(str, self.sequences.values()))}" if self.sequences else ""
            raise ShapeError(
                f"{type(self).__name__} got vectors of shape {tuple(vectors.shape)}; with {self.num_features} features{of} "
                f"and dim {self.dim} it expects [B, {self.num_columns}, {width}]."
            )
        if dense.shape != (vectors.shape[0], self.num_dense):
            raise ShapeError(
                f"{type(self).__name__} got dense features of shape {tuple(dense.shape)}; in addition to these vectors it "
                f"reads [{vectors.shape[0]}, {self.num_dense}]."
            )
        if not self.sequences:
            return self.logits(vectors, dense)
        wanted = (vectors.shape[0], len(self.sequences))
        if lengths is None or lengths.shape != wanted:
            given = None if lengths is None else tuple(lengths.shape)
            raise ShapeError(
                f"{type(self).__name__} got lengths of shape {given}; its sequences are {', '.join(self.sequences)}, so it "
                f"reads {list(wanted)}."
            )
        return self.logits(vectors, dense, lengths)


@dataclass(frozen=True)
class Limit:
    """A number (or each number of a tuple) must be at least `low` and less than `below`."""

    low: float
    below: float = math.inf

    def __str__(self) -> str:
        return f"at least {self.low:g}" + (f" and less than {self.below:g}" if self.below < math.inf else "")


Widths = Annotated[tuple[int, ...], Limit(1)]
Numbers = Annotated[tuple[int, ...], Limit(0)]
Rate = Annotated[float, Limit(0, 1)]
Count = Annotated[int, Limit(1)]
CountOrZero = Annotated[int, Limit(0)]
Activation = Literal["relu", "leaky_relu", "gelu", "silu", "tanh", "sigmoid"]


def model_options(model: type) -> dict[str, Any]:
    """Option name -> default, in the order of the constructor."""
    parameters = inspect.signature(model).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def check_options(name: str, model: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the constructor takes them; a ConfigError lists all that are wrong."""
    known = model_options(model)
    hints = get_type_hints(vars(model)["__init__"], include_extras=True)
    checked, mistakes = {}, []
    for option, value in options.items():
        if option not in known:
            near = difflib.get_close_matches(str(option), known, n=1)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            listed = ", ".join(f"{key}={default!r}" for key, default in known.items())
            mistakes.append(f"no option {option!r}; it has {listed or 'no options'}.{guess}")
            continue
        try:
            checked[option] = _convert(value, hints[option])
        except ValueError as error:
            mistakes.append(f"option {option!r} is {value!r}; it must be {error}.")
    if mistakes:
        raise ConfigError("\n".join(f"model {name!r}: {mistake}" for mistake in mistakes))
    return checked


def _convert(value: Any, hint: Any) -> Any:
    """The value converted to `hint`; the text of the ValueError completes "it must be ..."."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, limit = get_args(hint)
        return _within(_convert(value, inner), limit)
    if origin in (Union, types.UnionType):
        (inner,) = (arm for arm in get_args(hint) if arm is not types.NoneType)
        return None if value is None else _convert(value, inner)
    if origin is Literal:
        if value not in get_args(hint):
            raise ValueError("one of " + ", ".join(map(repr, get_args(hint))))
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        try:
            return tuple(_convert(item, int) for item in items)
        except ValueError:
            raise ValueError("a list of whole numbers, such as [256, 128]") from None
    return _scalar(value, hint)


def _scalar(value: Any, kind: type) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and is_number:
        return value
    if kind is float and is_number and math.isfinite(value):
        return float(value)
    if kind is str and isinstance(value, str):
        return value
    raise ValueError({bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind])


def _within(value: Any, limit: Limit) -> Any:
    for number in value if isinstance(value, tuple) else (value,):
        if not limit.low <= number < limit.below:
            raise ValueError(str(limit))
    return value
