"""The plain PyTorch baseline is what it says: same model on top, whole-table L2, plateau and early stop."""

import pytest
import torch

from benchmarks.plain_torch.train import Settings, evaluate, fit
from benchmarks.plain_torch.twin import PlainTwin
from hotbed.models import MODELS
from hotbed.types import Batch

ROWS = [5, 7, 3]


def batches(num_samples=192, size=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(rows, (num_samples,), generator=generator) for rows in ROWS], dim=1)
    labels = (ids[:, 0] % 2).float()
    dense = torch.randn(num_samples, 2, generator=generator)
    return [Batch(labels[i : i + size], dense[i : i + size], ids[i : i + size]) for i in range(0, num_samples, size)]


def twin_of(name, *, sparse=False, seed=0):
    torch.manual_seed(seed)
    return PlainTwin(name, ROWS, 4, 2, {}, sparse=sparse)


@pytest.mark.parametrize("name", MODELS)
def test_looks_up_what_one_wide_table_would(name):
    twin = twin_of(name)
    batch = batches()[0]
    per_feature = [list(twin.tables)[i :: twin.tables_per_feature] for i in range(twin.tables_per_feature)]
    wide = [torch.cat([table.weight for table in tables], dim=1) for tables in zip(*per_feature)]
    vectors = torch.stack([weights[batch.ids[:, f]] for f, weights in enumerate(wide)], dim=1)
    torch.testing.assert_close(twin(batch.ids, batch.dense), twin.model(vectors, batch.dense))


@pytest.mark.parametrize(("optimizer", "sparse"), [("adam", False), ("adam", True), ("adagrad", True), ("sgd", True)])
def test_learns_with_every_optimizer(optimizer, sparse):
    twin = twin_of("deepfm", sparse=sparse)
    done = fit(twin, lambda epoch: batches(), None, Settings(epochs=30, optimizer=optimizer, lr=0.05, dense_lr=0.01))
    assert (done.epochs, done.samples, done.valid_auc) == (30, 30 * 192, [])
    assert evaluate(twin, batches(seed=1)).auc > 0.99


def test_l2_pulls_rows_that_no_sample_touches():
    twin, free = twin_of("lr"), twin_of("lr")
    untouched = [Batch(b.labels, b.dense, torch.zeros_like(b.ids)) for b in batches()]
    start = free.tables[1].weight[3].item()
    fit(free, lambda epoch: untouched, None, Settings(epochs=2, lr=1e-3))
    fit(twin, lambda epoch: untouched, None, Settings(epochs=2, lr=1e-3, l2=0.1))
    assert free.tables[1].weight[3].item() == start
    assert abs(twin.tables[1].weight[3].item()) < abs(start)


def test_l2_needs_gradients_of_whole_tables():
    with pytest.raises(ValueError, match="sparse must be False"):
        fit(twin_of("lr", sparse=True), lambda epoch: batches(), None, Settings(l2=0.1))


def test_stops_early_and_keeps_the_best():
    twin = twin_of("dnn")
    flipped = [Batch(1 - b.labels, b.dense, b.ids) for b in batches(seed=1)]  # training makes this ever worse
    done = fit(
        twin, lambda epoch: batches(), lambda epoch: flipped, Settings(epochs=50, patience=2, plateau_factor=0.1)
    )
    assert done.epochs < 50
    assert done.epochs == done.valid_auc.index(max(done.valid_auc)) + 3
    assert evaluate(twin, flipped).auc == max(done.valid_auc)
