"""Two towers for retrieval: vectors of users and items in, a loss, item vectors for an index, and recall@k out.

A tower maps the looked-up vectors of its side to one unit vector; the score of a pair is their product over a temperature.
Training compares every user with the items of its batch (in-batch sampled softmax). An item is drawn as a negative as often as
it occurs, so popular items are pushed down too much; subtracting log(frequency) from its score corrects this (logQ), and the
towers then estimate p(item | user) over all items. The price of a step is one product [B, B].

Shapes: B pairs of a batch, U users, I items, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.errors import ConfigError, ShapeError
from hotbed.host.atomic import rewriting, writing

__all__ = ["Towers", "TwoTower", "in_batch_softmax", "log_frequency", "recall_at_k", "write_item_vectors"]


class Towers(NamedTuple):
    """Unit vectors of the two sides."""

    users: Tensor  # [B, D]
    items: Tensor  # [B, D]


class TwoTower(nn.Module):
    """A tower for users and one for items; without `hidden` layers, a tower is the looked-up vector itself.

    Inputs are [B, width of the side]: the vectors of its features side by side, numbers too if there are some.

    Reference: Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations, RecSys 2019
    """

    def __init__(
        self, user_width: int, item_width: int, *, hidden: Sequence[int] = (), dim: int = 0, temperature: float = 0.1
    ) -> None:
        super().__init__()
        if temperature <= 0:
            raise ConfigError(f"temperature is {temperature}; it must be above 0.")
        if not dim and not hidden and user_width != item_width:
            raise ConfigError(
                f"users have {user_width} numbers and items {item_width}; give dim=, to which the towers map both."
            )
        self.temperature = temperature
        self.user_tower, self.item_tower = (_tower(width, hidden, dim) for width in (user_width, item_width))

    def users(self, vectors: Tensor) -> Tensor:
        """Unit vectors [B, D] of users."""
        return F.normalize(self.user_tower(vectors), dim=1)

    def items(self, vectors: Tensor) -> Tensor:
        """Unit vectors [B, D] of items, for an index of nearest neighbours."""
        return F.normalize(self.item_tower(vectors), dim=1)

    def forward(self, user_vectors: Tensor, item_vectors: Tensor) -> Towers:
        return Towers(self.users(user_vectors), self.items(item_vectors))

    def loss(self, user_vectors: Tensor, item_vectors: Tensor, item_ids: Tensor, log_q: Tensor | None = None) -> Tensor:
        """The in-batch softmax loss of B pairs; `log_q` [B]: log frequencies of these items."""
        towers = self(user_vectors, item_vectors)
        return in_batch_softmax(towers.users, towers.items, item_ids, log_q, self.temperature)


def _tower(width: int, hidden: Sequence[int], dim: int) -> nn.Module:
    layers: list[nn.Module] = []
    for number in hidden:
        layers += [nn.Linear(width, number), nn.ReLU()]
        width = number
    return nn.Sequential(*layers, nn.Linear(width, dim)) if dim else nn.Sequential(*layers)


def in_batch_softmax(
    users: Tensor, items: Tensor, item_ids: Tensor, log_q: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """Mean cross-entropy of choosing the item of each pair among those of the batch.

    An item that occurs again in the batch is no negative of itself: its other places are left out. `log_q` [B] is subtracted
    from the scores of the items.
    """
    size = users.shape[0]
    if items.shape != users.shape or item_ids.shape != (size,) or (log_q is not None and log_q.shape != (size,)):
        given = [list(one.shape) for one in (users, items, item_ids, *([] if log_q is None else [log_q]))]
        raise ShapeError(f"in_batch_softmax takes users and items [B, D], item_ids and log_q [B]; got {given}.")
    scores = users @ items.T / temperature
    if log_q is not None:
        scores = scores - log_q
    same = item_ids.unsqueeze(1) == item_ids.unsqueeze(0)
    scores = scores.masked_fill(same & ~torch.eye(size, dtype=torch.bool, device=same.device), -torch.inf)
    return F.cross_entropy(scores, torch.arange(size, device=scores.device))


def log_frequency(counts: Tensor) -> Tensor:
    """log(count / total) of every item, float32; items that never occur count as once."""
    known = counts.double().clamp(min=1)
    return (known / known.sum()).log().float()


def recall_at_k(
    users: Tensor, items: Tensor, wanted: Sequence[Sequence[int]], seen: Sequence[Sequence[int]], k: int = 20
) -> float:
    """The mean over users of |top k and wanted| / |wanted|; items a user has `seen` are not recommended.

    `users` [U, D] and `items` [I, D] are vectors; `wanted` and `seen` hold item rows for every user. A user who wants nothing
    is left out.
    """
    if k < 1 or len(wanted) != users.shape[0] or len(seen) != users.shape[0]:
        given = f"k={k}, {len(wanted)} and {len(seen)} lists"
        raise ShapeError(f"recall_at_k takes k from 1 and lists for each of {users.shape[0]} users; got {given}.")
    found: list[float] = []
    for start in range(0, users.shape[0], 1024):
        some = range(start, min(start + 1024, users.shape[0]))
        scores = users[start : start + 1024] @ items.T
        for row, user in enumerate(some):
            scores[row, torch.as_tensor(seen[user], dtype=torch.int64, device=scores.device)] = -torch.inf
        top = scores.topk(min(k, items.shape[0]), dim=1).indices.cpu().numpy()
        for row, user in enumerate(some):
            if len(wanted[user]):
                found.append(len(np.intersect1d(top[row], wanted[user])) / len(set(wanted[user])))
    return float(np.mean(found)) if found else float("nan")


def write_item_vectors(path: str | Path, ids: Tensor, vectors: Tensor) -> None:
    """Write item vectors for an index as Parquet, `id` int64 and `vector` float32 [D]; the file appears when it is complete."""
    path = Path(path)
    if ids.ndim != 1 or vectors.ndim != 2 or len(ids) != len(vectors):
        raise ShapeError(
            f"write_item_vectors takes ids [I] and vectors [I, D]; got {list(ids.shape)} and {list(vectors.shape)}."
        )
    flat = pa.array(vectors.detach().float().cpu().contiguous().view(-1).numpy())
    columns = {"id": ids.cpu().numpy(), "vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])}
    with writing(path), rewriting(path) as temporary:
        pq.write_table(pa.table(columns), temporary)
