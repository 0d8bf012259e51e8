"""Two towers for retrieval: vectors of users and items in, a loss, item vectors for an index, recall@k and NDCG@k out.

A tower maps the looked-up vectors of its side to one unit vector; the score of a pair is their product over a temperature.
Training compares every user with the items of its batch (in-batch sampled softmax). An item is drawn as a negative as often as
it occurs, so popular items are pushed down too much; subtracting log(frequency) from its score corrects this (logQ), and the
towers then estimate p(item | user) over all items. The price of a step is one product [B, B]. Or it compares each pair with K
items that the user does not have (`NegativeSampler`), by the Bayesian personalised ranking loss: K more lookups per pair.

Shapes: B pairs of a batch, K negatives of a pair, U users, I items, D width.
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

__all__ = [
    "NegativeSampler",
    "Ranking",
    "Towers",
    "TwoTower",
    "bpr",
    "in_batch_softmax",
    "log_frequency",
    "ranking_at_k",
    "recall_at_k",
    "write_item_vectors",
]
_ROUNDS = 8  # of drawing again what a user has, before the others are listed


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

    def bpr_loss(self, user_vectors: Tensor, item_vectors: Tensor, negative_vectors: Tensor) -> Tensor:
        """The BPR loss of B pairs, each with K negatives [B, K, width of an item]."""
        towers, size = self(user_vectors, item_vectors), negative_vectors.shape[:2]
        negatives = self.items(negative_vectors.flatten(0, 1)).view(*size, -1)
        return bpr(towers.users, towers.items, negatives, self.temperature)


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

    An item that occurs again in the batch is not a negative of itself: its other places are left out. `log_q` [B] is subtracted
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


def bpr(users: Tensor, items: Tensor, negatives: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean of -log sigmoid(score of the item - score of a negative), over pairs and their negatives [B, K, D].

    Reference: Rendle et al., BPR: Bayesian Personalized Ranking from Implicit Feedback, UAI 2009, arXiv 1205.2618
    """
    if items.shape != users.shape or negatives.ndim != 3 or negatives[:, 0].shape != users.shape:
        given = [list(one.shape) for one in (users, items, negatives)]
        raise ShapeError(f"bpr takes users and items [B, D] and negatives [B, K, D], K from 1; got {given}.")
    better = ((users * items).sum(1, keepdim=True) - torch.bmm(negatives, users.unsqueeze(2)).squeeze(2)) / temperature
    return F.softplus(-better).mean()


class NegativeSampler:
    """Draws items that a user does not have, all equally often. The same generator gives the same items."""

    def __init__(self, pairs: Tensor, num_items: int) -> None:
        """`pairs` int64 [P, 2]: user and item, items from 0 to num_items - 1; on the CPU, 8 bytes a pair are kept."""
        if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.is_floating_point():
            raise ShapeError(
                f"NegativeSampler takes pairs [P, 2] of user and item; got {list(pairs.shape)} of {pairs.dtype}."
            )
        known = pairs.to("cpu", torch.int64)
        if len(known) and (int(known.min()) < 0 or int(known[:, 1].max()) >= num_items):
            raise ConfigError(
                f"pairs hold users from {int(known[:, 0].min())} and items from {int(known[:, 1].min())} to "
                f"{int(known[:, 1].max())}; users count from 0, items from 0 to {num_items - 1} (num_items={num_items})."
            )
        self.num_items = num_items
        self._known = torch.unique(known[:, 0] * num_items + known[:, 1])  # sorted
        owners, counts = torch.unique(self._known // max(num_items, 1), return_counts=True)
        if bool((counts >= num_items).any()):
            raise ConfigError(
                f"user {int(owners[counts >= num_items][0])} has all {num_items} items, so there is no negative to draw. Leave "
                "such users out, or give the number of all items."
            )

    def draw(self, users: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """`count` items for each of the users [B], int64 [B, count], on their device."""
        owners = users.to("cpu", torch.int64).repeat_interleave(count)
        found = torch.randint(self.num_items, owners.shape, generator=generator, device="cpu", dtype=torch.int64)
        bad = self._has(owners, found).nonzero().view(-1)
        for _ in range(_ROUNDS):
            if not len(bad):
                break
            found[bad] = torch.randint(self.num_items, bad.shape, generator=generator, device="cpu", dtype=torch.int64)
            bad = bad[self._has(owners[bad], found[bad])]
        for place in bad.tolist():  # of users who have nearly everything
            others = (
                ~self._has(owners[place].expand(self.num_items), torch.arange(self.num_items, device="cpu"))
            ).nonzero()
            found[place] = others[torch.randint(len(others), (1,), generator=generator, device="cpu")].view(())
        return found.view(len(users), count).to(users.device)

    def _has(self, users: Tensor, items: Tensor) -> Tensor:
        """Whether each of the users has its item."""
        if not len(self._known):
            return torch.zeros(len(users), dtype=torch.bool, device="cpu")
        keys = users * self.num_items + items
        places: Tensor = torch.searchsorted(self._known, keys).clamp(max=len(self._known) - 1)
        return torch.eq(self._known[places], keys)


def log_frequency(counts: Tensor) -> Tensor:
    """log(count / total) of every item, float32; items that never occur count as once."""
    known = counts.double().clamp(min=1)
    return (known / known.sum()).log().float()


class Ranking(NamedTuple):
    """How good the first k items are, as the mean over users; nan if no user wants anything."""

    recall: float  # |top k and wanted| / |wanted|
    ndcg: float  # sum of 1 / log2(1 + rank) over wanted items of the top k, over that of a perfect order


def ranking_at_k(
    users: Tensor, items: Tensor, wanted: Sequence[Sequence[int]], seen: Sequence[Sequence[int]], k: int = 20
) -> Ranking:
    """Recall@k and NDCG@k; items a user has `seen` are not recommended.

    `users` [U, D] and `items` [I, D] are vectors; `wanted` and `seen` hold item rows for every user. A user who wants nothing
    is left out.
    """
    if k < 1 or len(wanted) != users.shape[0] or len(seen) != users.shape[0]:
        given = f"k={k}, {len(wanted)} and {len(seen)} lists"
        raise ShapeError(f"ranking_at_k takes k from 1 and lists for each of {users.shape[0]} users; got {given}.")
    gains = 1 / np.log2(np.arange(min(k, items.shape[0])) + 2)
    best = np.cumsum(gains)
    found: list[tuple[float, float]] = []
    for start in range(0, users.shape[0], 1024):
        some = range(start, min(start + 1024, users.shape[0]))
        scores = users[start : start + 1024] @ items.T
        for row, user in enumerate(some):
            scores[row, torch.as_tensor(seen[user], dtype=torch.int64, device=scores.device)] = -torch.inf
        values, top = scores.topk(len(gains), dim=1)
        ranked = torch.where(values > -torch.inf, top, -1).cpu().numpy()  # fewer than k may be left
        for row, user in enumerate(some):
            if num_wanted := len(set(wanted[user])):
                hits = np.isin(ranked[row], wanted[user])
                found.append((hits.sum() / num_wanted, hits @ gains / best[min(num_wanted, len(best)) - 1]))
    return Ranking(*map(float, np.mean(found, axis=0))) if found else Ranking(float("nan"), float("nan"))


def recall_at_k(
    users: Tensor, items: Tensor, wanted: Sequence[Sequence[int]], seen: Sequence[Sequence[int]], k: int = 20
) -> float:
    """The recall of `ranking_at_k`."""
    return ranking_at_k(users, items, wanted, seen, k).recall


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
