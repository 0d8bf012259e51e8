"""Contributions by permutation and the worst errors, of a model whose only feature is known."""

from types import SimpleNamespace

import pytest
import torch

from hotbed.errors import RunError
from hotbed.train.evaluation import MOST_ERRORS, analyze
from hotbed.types import Batch, Jagged

SCHEMA = SimpleNamespace(
    dense=[SimpleNamespace(name="price")],
    features=[
        SimpleNamespace(name="ad", multi=False),
        SimpleNamespace(name="user", multi=False),
        SimpleNamespace(name="tags", multi=True),
    ],
)


def batches(count=3, size=200):
    chance = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.randint(10, (size, 2), generator=chance)
        lengths = torch.randint(3, (size,), generator=chance)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        tags = Jagged(torch.randint(5, (int(offsets[-1]),), generator=chance), offsets)
        labels = (ids[:, 0] + 3 * torch.rand(size, generator=chance) > 7).float()
        yield Batch(labels, torch.rand(size, 1, generator=chance), ids, {"tags": tags})


class Loader:
    batch_size = 200

    def __init__(self, given):
        self.given = given

    def epoch(self, _):
        yield from self.given


class Learner:
    """Looks at `ad`, and a little at the bags."""

    def ahead(self, given):
        yield from given

    def score(self, batch):
        bag = batch.bags["tags"]
        sums = torch.segment_reduce(bag.values.double(), "sum", offsets=bag.offsets, initial=0.0)
        return (batch.ids[:, 0] - 6.5 + 0.01 * sums).float()


@pytest.fixture(scope="module")
def found():
    return analyze(Learner(), Loader(list(batches())), SCHEMA, "test")


def test_only_what_the_model_uses_contributes(found):
    assert next(iter(found.contributions)) == "ad"
    assert found.contributions["ad"] > 0.3
    assert found.contributions["user"] == found.contributions["price"] == 0
    assert found.contributions["tags"] != 0
    assert found.samples == 600


def test_the_worst_errors_are_those(found):
    given = list(batches())
    labels, logits = torch.cat([b.labels for b in given]), torch.cat([Learner().score(b) for b in given])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    assert len(found.worst) == MOST_ERRORS
    assert [loss[one.row].item() for one in found.worst] == pytest.approx(
        loss.sort(descending=True).values[:MOST_ERRORS].tolist()
    )
    one = found.worst[0]
    batch, place = given[one.row // 200], one.row % 200
    assert one.ids["ad"] == [int(batch.ids[place, 0])]
    offsets = batch.bags["tags"].offsets
    assert one.ids["tags"] == batch.bags["tags"].values[offsets[place] : offsets[place + 1]].tolist()
    assert one.dense["price"] == pytest.approx(float(batch.dense[place, 0]))
    assert one.label == int(labels[one.row])
    assert one.score == pytest.approx(float(logits[one.row].sigmoid()), rel=1e-5)


def test_it_is_the_same_again(found):
    assert analyze(Learner(), Loader(list(batches())), SCHEMA, "test") == found


def test_an_empty_split_is_refused():
    with pytest.raises(RunError, match="nothing to analyze"):
        analyze(Learner(), Loader([]), SCHEMA, "test")
