"""Law 1 for outputs: "stack", "concat" and "dict" train the same rows to the bit, however a model uses the features."""

import pytest
import torch

import hotbed
from hotbed import Table, optim

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = "abcd"
DIM = 5
PLACES = {
    "whole": ({}, False),
    "cached": ({"cache": 0.6}, False),
    "prefetched": ({"cache": 0.6}, True),
    "dynamic": ({"cache": 0.6}, False),
}

# What a model does with features [B, D]; each use leaves their gradients in memory in another way.
USES = {
    "together": lambda v: torch.cat(list(v.values()), dim=1).sin().sum(),
    "stacked": lambda v: torch.stack(list(v.values()), dim=1).prod(dim=1).tanh().sum(),
    "in another order": lambda v: torch.cat([v[name] for name in "dbca"], dim=1).sin().sum(),
    "apart": lambda v: v["a"].sin().sum() * v["b"].cos().sum() + (v["c"] * v["d"]).tanh().sum(),
    "twice": lambda v: torch.cat(list(v.values()), dim=1).sin().sum() + (v["b"] * v["b"]).sum(),
    "one missing": lambda v: torch.cat([v["a"], v["b"], v["d"]], dim=1).sin().sum(),
    "one alone": lambda v: v["c"].sin().sum(),
    "one detached": lambda v: torch.cat([v["a"].detach(), v["b"], v["c"], v["d"]], dim=1).sin().sum(),
    "expanded": lambda v: sum(one.sum() for one in v.values()),
    "through a view": lambda v: torch.cat([one.unsqueeze(1) for one in v.values()], dim=1).flatten(1).sin().sum(),
}


def features_of(vectors, output):
    """{feature: [B, D]} of any output, cut by plain slices where it is one tensor."""
    if output == "dict":
        return vectors
    block = vectors.view(vectors.shape[0], len(NAMES), DIM)
    return {name: block[:, j] for j, name in enumerate(NAMES)}


def train(output, use, place, device):
    budgets, ahead = PLACES[place]
    rows = {"a": 30, "b": 7, "c": 50, "d": 11}
    declared = {name: Table(None if place == "dynamic" else rows[name], DIM) for name in NAMES}
    tables = hotbed.EmbeddingTables(
        declared,
        optim.Adam(lr=0.1),
        output=output,
        device=device,
        **(budgets if place != "dynamic" else {"hbm": "1MiB"}),
    )
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.stack([torch.randint(rows[name], (size,), generator=generator) for name in NAMES], dim=1).to(device)
        for size in (13, 13, 1, 8)
    ]
    losses = []
    for ids in hotbed.prefetch(batches, tables) if ahead else batches:
        loss = use(features_of(tables(ids), output))
        loss.backward()
        losses.append(loss.item())
    return losses, {name: tables.rows(name) for name in NAMES}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("use", USES)
def test_outputs_train_the_same_rows(use, place, device):
    losses, rows = train("stack", USES[use], place, device)
    for output in ("concat", "dict"):
        other_losses, other_rows = train(output, USES[use], place, device)
        assert other_losses == losses
        for name in NAMES:
            (ids, columns), (other_ids, other_columns) = rows[name], other_rows[name]
            assert torch.equal(ids, other_ids)
            assert all(torch.equal(columns[part], other_columns[part]) for part in columns), (output, name)
