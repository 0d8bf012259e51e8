"""Padding of sequences, and the block that models read: against a loop over samples, forward and backward."""

from __future__ import annotations

import pytest
import torch

import hotbed
from hotbed.errors import ShapeError
from hotbed.models import ModelSchema, block_of, build_model, pad
from hotbed.models.own import OwnModel
from hotbed.models.sequence import sequences_in
from hotbed.train.metrics import auc
from hotbed.types import Jagged


@pytest.mark.parametrize("lengths", [[3, 0, 1, 2], [0, 0], [4], []])
def test_padding_puts_every_vector_in_its_place(lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    vectors = torch.randn(sum(lengths), 5, requires_grad=True)
    padded = pad(vectors, offsets, 4)
    expected = torch.zeros(len(lengths), 4, 5)
    for b, length in enumerate(lengths):
        expected[b, :length] = vectors[int(offsets[b]) : int(offsets[b]) + length].detach()
    assert torch.equal(padded.vectors, expected)
    assert padded.lengths.tolist() == lengths
    assert torch.equal(padded.mask, (torch.arange(4) < torch.tensor(lengths).view(-1, 1)))
    weights = torch.randn_like(expected)
    (padded.vectors * weights).sum().backward()
    real = [weights[b, :length] for b, length in enumerate(lengths)]
    assert torch.equal(vectors.grad, torch.cat(real) if real else torch.zeros(0, 5))


def test_a_block_has_pooled_features_first_and_gives_sequences_back():
    bags = {
        "b": Jagged(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])),
        "d": Jagged(torch.tensor([4]), torch.tensor([0, 0, 1])),
    }
    tables = hotbed.EmbeddingTables(
        {
            "a": hotbed.Table(9, 3),
            "b": hotbed.Table(9, 3, "none"),
            "c": hotbed.Table(9, 3),
            "d": hotbed.Table(9, 3, "none"),
        }
    )
    found = tables(torch.tensor([[5, 6], [7, 8]]), bags)
    block, lengths = block_of(found, {"b": 4, "d": 1}, bags)
    assert block.shape == (2, 2 + 4 + 1, 3)
    assert torch.equal(block[:, 0], found["a"])
    assert torch.equal(block[:, 1], found["c"])
    assert lengths.tolist() == [[2, 0], [1, 1]]
    parts = sequences_in(block, {"b": 4, "d": 1}, lengths)
    assert torch.equal(parts["b"].vectors[0, :2], found["b"][:2])
    assert not parts["b"].vectors[0, 2:].any()
    assert torch.equal(parts["d"].vectors[1], found["d"])
    before = tables.weight("b").clone()
    block.sum().backward()  # reaches the rows of sequences as of pooled features
    assert set((tables.weight("b") != before).any(1).nonzero().view(-1).tolist()) == {1, 2, 3}


def test_a_model_without_sequences_gets_what_the_tables_gave():
    vectors = torch.randn(3, 2, 4)
    assert block_of(vectors, {}, {})[0] is vectors
    assert block_of({"a": vectors[:, 0], "b": vectors[:, 1]}, {}, {})[1] is None


class Net(torch.nn.Module):
    def forward(self, inputs):
        history = inputs.sequences["history"]
        return (history.vectors * history.mask.unsqueeze(2)).sum((1, 2)) + inputs.vectors["item"].sum(1)


def test_shapes_that_do_not_fit_are_refused():
    model = OwnModel(Net(), ModelSchema(("item",), 4, (), {"history": 5}))
    assert model(torch.randn(2, 6, 4), torch.zeros(2, 0), torch.tensor([[5], [0]])).shape == (2,)
    with pytest.raises(ShapeError, match=r"expects \[B, 6, 4\]"):
        model(torch.randn(2, 5, 4), torch.zeros(2, 0), torch.tensor([[5], [0]]))
    with pytest.raises(ShapeError, match=r"its sequences are history, so it reads \[2, 1\]"):
        model(torch.randn(2, 6, 4), torch.zeros(2, 0))
    with pytest.raises(ShapeError, match=r"expects \[B, 2, 4\]"):  # models that pool have no such columns
        build_model("dnn", num_features=2, dim=4, num_dense=0, options={})(torch.randn(2, 6, 4), torch.zeros(2, 0))


def history_log(num, generator):
    """A sample is positive where its item is in its history of up to six."""
    histories = torch.randint(1, 30, (num, 6), generator=generator)
    lengths = torch.randint(1, 7, (num,), generator=generator)
    inside = histories.gather(1, (torch.rand(num, generator=generator) * lengths).long().view(-1, 1)).view(-1)
    items = torch.where(
        torch.rand(num, generator=generator) < 0.5, inside, torch.randint(1, 30, (num,), generator=generator)
    )
    mask = torch.arange(6) < lengths.view(-1, 1)
    labels = ((histories == items.view(-1, 1)) & mask).any(1).float()
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return items, Jagged(histories[mask], offsets), labels


def fitted_auc(name):
    """The AUC on new samples, after training on others; item and history read one table."""
    torch.manual_seed(0)
    features = {"items": hotbed.Table(30, 8, "none", features=("item", "history"), init=hotbed.Normal(0.3))}
    tables = hotbed.EmbeddingTables(features, hotbed.optim.Adam(lr=0.01))
    sequences = {"history": 6} if name == "din" else {}
    options = {"hidden": [32], **({"target": "item"} if sequences else {})}
    common = {"dim": 8, "num_dense": 0, "options": options, "features": ["item"], "sequences": sequences}
    model = build_model(name, num_features=1 if sequences else 2, **common)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)

    def score(items, history):
        found = tables({"item": items, "history": history})
        dense = torch.zeros(len(items), 0)
        if sequences:
            block, lengths = block_of(found, sequences, {"history": history})
            return model(block, dense, lengths)
        padded = pad(found["history"], history.offsets, 6)
        mean = padded.vectors.sum(1) / padded.lengths.view(-1, 1)
        return model(torch.stack([found["item"], mean], dim=1), dense)

    for _ in range(150):
        items, history, labels = history_log(256, generator)
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(score(items, history), labels).backward()
        optimizer.step()
    items, history, labels = history_log(3000, generator)
    with torch.no_grad():
        return auc(labels.numpy(), score(items, history).numpy())


def test_din_finds_the_item_in_a_history_and_a_pooled_history_does_not():
    found = {name: fitted_auc(name) for name in ("din", "dnn")}
    assert found["din"] > 0.9
    assert found["din"] > found["dnn"] + 0.05
