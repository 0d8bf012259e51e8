"""EmbeddingBag: one table behind the arguments of `torch.nn.EmbeddingBag`.

What differs: the rows are updated in backward by `optimizer`, so they are not parameters and `model.parameters()` does not
hold them; `sparse` is accepted and means nothing, because gradients are always sparse and never stored; initial values come
from (seed, table, id) and are nearly normal with deviation 1. `cache`, `hbm`, `memory`, `ssd` and `independent` are those of
EmbeddingTables; behind a cache `weight` is a copy, and there is no `max_norm`. `load_state_dict` also takes what an
nn.EmbeddingBag saved.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hotbed.errors import ConfigError, ShapeError
from hotbed.ops.init_rows import Normal
from hotbed.optim import Adagrad, RowOptimizer
from hotbed.tables.inputs import as_tensor
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.spec import Table
from hotbed.types import Jagged

_NAME = "table"


class EmbeddingBag(nn.Module):
    """Bags of ids -> one vector each, by sum, mean or max; `torch.nn.EmbeddingBag` explains the arguments.

    bag = hotbed.EmbeddingBag(1_000_000, 16, mode="sum", optimizer=hotbed.optim.Adagrad(lr=0.05))
    vectors = bag(values, offsets)      # or bag(matrix [B, T])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Literal["sum", "mean", "max"] = "mean",
        sparse: bool = True,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        optimizer: RowOptimizer | None = None,
        seed: int = 0,
        frozen: bool = False,
        cache: float | None = None,
        hbm: str | int | None = None,
        memory: str | int | None = None,
        ssd: str | None = None,
        independent: bool = False,
    ) -> None:
        super().__init__()
        if mode not in ("sum", "mean", "max"):
            raise ConfigError(f"mode must be 'sum', 'mean' or 'max', not {mode!r}")
        if dtype not in (None, torch.float32):
            raise ConfigError(f"rows are float32; dtype {dtype} is not supported")
        budgets: dict[str, Any] = {"cache": cache, "hbm": hbm, "memory": memory, "ssd": ssd}
        if max_norm is not None and any(one is not None for one in budgets.values()):
            raise ConfigError(
                f"max_norm={max_norm!r} changes rows as they are read, which rows behind a cache are not; leave out max_norm, "
                f"or {', '.join(f'{name}=' for name, one in budgets.items() if one is not None)}"
            )
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ConfigError(f"padding_idx must lie within the {num_embeddings} rows, not {padding_idx}")
            padding_idx %= num_embeddings
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.mode, self.sparse = scale_grad_by_freq, mode, sparse
        self.include_last_offset, self.padding_idx = include_last_offset, padding_idx
        pooling: Literal["sum", "mean", "none"] = "none" if mode == "max" else mode
        table = Table(num_embeddings, embedding_dim, pooling=pooling, padding_id=padding_idx, init=Normal(1.0))
        optimizer = optimizer if optimizer is not None else Adagrad()
        if scale_grad_by_freq:
            optimizer = dataclasses.replace(optimizer, scale_by_count=True)
        self.tables = EmbeddingTables(
            {_NAME: table},
            optimizer,
            seed=seed,
            device=device or "cpu",
            output="dict",
            independent=independent,
            **budgets,
        )
        self.frozen = frozen
        if _weight is not None:
            if tuple(_weight.shape) != (num_embeddings, embedding_dim):
                raise ShapeError(f"_weight must be [{num_embeddings}, {embedding_dim}]; got {list(_weight.shape)}")
            self.tables.load_weight(_NAME, _weight)

    @property
    def frozen(self) -> bool:
        """Whether rows never learn, as after `requires_grad_(False)`."""
        return self.tables.is_frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self.tables.requires_grad_(not frozen)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **arguments: Any) -> EmbeddingBag:
        """A bag over given rows [rows, dim]; frozen rows are never updated."""
        rows, dim = embeddings.shape
        return cls(rows, dim, _weight=embeddings, frozen=freeze, **arguments)

    @property
    def weight(self) -> Tensor:
        """The rows [num_embeddings, embedding_dim]: a view, so writing to it changes them; behind a cache, a copy."""
        return self.tables.weight(_NAME)

    def __setattr__(self, name: str, value: Any) -> None:
        """`bag.weight = nn.Parameter(...)`, as code for nn.EmbeddingBag has it, replaces the rows; optimizer state stays."""
        if name != "weight":
            super().__setattr__(name, value)
            return
        if not isinstance(value, Tensor):
            raise ShapeError(
                f"weight must be a tensor [{self.num_embeddings}, {self.embedding_dim}], not {type(value).__name__}"
            )
        self.tables.load_weight(_NAME, value.detach())

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """One vector per bag [B, D]: bags are the rows of a matrix [B, T], or cut from a list by `offsets`."""
        bags = self._bags(input, offsets, per_sample_weights)
        if self.max_norm is not None and bool(((bags.values >= 0) & (bags.values < self.num_embeddings)).all()):
            self.tables.claim()
            group = self.tables.group_of(_NAME)
            group.residency.touch(bags.values)
            torch.embedding_renorm_(group.columns(_NAME)["weight"], bags.values, self.max_norm, self.norm_type)
        vectors: Tensor = self.tables({_NAME: bags})[_NAME]
        if self.mode == "max":
            return _maximum(vectors, bags, self.padding_idx)
        return vectors

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """The `weight` of an nn.EmbeddingBag stands for that of the table; the optimizer state stays."""
        inside = f"{prefix}tables."
        if f"{prefix}weight" in state_dict and not any(name.startswith(inside) for name in state_dict):
            weight = state_dict.pop(f"{prefix}weight")
            state_dict |= {**self.tables.state_dict(prefix=inside), f"{inside}{_NAME}.weight": weight}
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"

    def _bags(self, input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Jagged:
        as_tensor("input", input)
        if offsets is not None:
            as_tensor("offsets", offsets)
        if weights is not None:
            if self.mode != "sum":
                raise ShapeError(f"per_sample_weights need mode 'sum', not {self.mode!r}")
            if weights.shape != input.shape:
                raise ShapeError(
                    f"per_sample_weights must have the shape of the input, {list(input.shape)}; got {list(weights.shape)}"
                )
            weights = weights.reshape(-1)
        if input.ndim == 2:
            if offsets is not None:
                raise ShapeError("a matrix of ids has one bag per row; give no offsets with it")
            rows, width = input.shape
            return Jagged(input.reshape(-1), torch.arange(rows + 1, device=input.device) * width, weights)
        if input.ndim != 1 or offsets is None or offsets.ndim != 1:
            raise ShapeError("give ids as a matrix [B, T], or as a list [L] with offsets [B]")
        if not self.include_last_offset:
            end = torch.tensor([input.shape[0]], dtype=offsets.dtype, device=offsets.device)
            offsets = torch.cat([offsets, end])
        elif offsets.shape[0] == 0:
            raise ShapeError("with include_last_offset, offsets need at least one entry, the number of ids")
        return Jagged(input, offsets, weights)


def _maximum(vectors: Tensor, bags: Jagged, padding_idx: int | None) -> Tensor:
    """The element-wise maximum of every bag [B, D]; zero for a bag without values."""
    lengths = bags.offsets.diff()
    size, width = int(lengths.shape[0]), int(lengths.max()) if lengths.numel() else 0
    if width == 0:
        return vectors.new_zeros(size, vectors.shape[1]) + vectors.sum()  # no values: zero, but part of the graph
    place = torch.arange(width, device=vectors.device)
    here = place < lengths.unsqueeze(1)  # [B, T]
    index = (bags.offsets[:-1].unsqueeze(1) + place).clamp(max=max(0, int(bags.values.shape[0]) - 1))
    if padding_idx is not None:
        here = here & (bags.values[index] != padding_idx)
    padded = torch.where(here.unsqueeze(2), vectors[index], float("-inf"))
    return torch.where(here.any(1, keepdim=True), padded.max(dim=1).values, 0.0)
