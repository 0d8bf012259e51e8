"""Beside the real TorchRec and FBGEMM, where they are installed."""

import logging
import warnings

import pytest
import torch

import hotbed
from hotbed.interop import load_state_dict, state_dict

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # it says much when it is imported
    try:
        torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    finally:
        logging.disable(logging.NOTSET)
pytestmark = pytest.mark.filterwarnings("ignore")


def keyed(seed=0, size=8):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * size,), generator=generator)
    values = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
    return torchrec.KeyedJaggedTensor(keys=["user", "ad", "seen"], values=values, lengths=lengths)


def tables_of(optimizer, pooling="sum", **settings):
    tables = {
        "users": hotbed.Table(10, 4, pooling, features=("user",)),
        "ads": hotbed.Table(9, 4, pooling, features=("ad", "seen")),
    }
    return hotbed.EmbeddingTables(tables, optimizer, output="dict", **settings)


def test_an_embedding_bag_collection_gives_the_same_vectors():
    tables = tables_of(hotbed.optim.SGD(lr=0.1))
    for seed in range(3):
        sum((one * one).sum() for one in tables(keyed(seed)).values()).backward()
    configs = [
        torchrec.EmbeddingBagConfig(name="users", embedding_dim=4, num_embeddings=10, feature_names=["user"]),
        torchrec.EmbeddingBagConfig(name="ads", embedding_dim=4, num_embeddings=9, feature_names=["ad", "seen"]),
    ]
    collection = torchrec.EmbeddingBagCollection(tables=configs)
    collection.load_state_dict(state_dict(tables, style="torchrec"))
    theirs = collection(keyed(5)).to_dict()
    ours = tables.eval()(keyed(5))
    for name, vectors in ours.items():
        torch.testing.assert_close(vectors.detach(), theirs[name].detach(), rtol=0, atol=1e-6)
    other = tables_of(hotbed.optim.SGD(lr=0.1), seed=3)
    load_state_dict(other, collection.state_dict(), style="torchrec")
    assert all(torch.equal(other.weight(name), tables.weight(name)) for name in tables.tables)


def test_an_embedding_collection_gives_the_same_sequences():
    tables = tables_of(hotbed.optim.SGD(lr=0.1), pooling="none")
    configs = [
        torchrec.EmbeddingConfig(name="users", embedding_dim=4, num_embeddings=10, feature_names=["user"]),
        torchrec.EmbeddingConfig(name="ads", embedding_dim=4, num_embeddings=9, feature_names=["ad", "seen"]),
    ]
    collection = torchrec.EmbeddingCollection(tables=configs)
    load_state_dict(tables, collection.state_dict(), style="torchrec")
    theirs = collection(keyed(5))
    for name, vectors in tables.eval()(keyed(5)).items():
        torch.testing.assert_close(vectors.detach(), theirs[name].values().detach())


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adagrad"])
def test_fbgemm_goes_on_where_hotbed_stopped(kind):
    """Rows and sums travel there; the next steps on both sides give the same rows; and they travel back."""
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    kinds = pytest.importorskip("fbgemm_gpu.split_embedding_configs").EmbOptimType
    optimizer = hotbed.optim.row_optimizer(kind, lr=0.1, eps=1e-8)
    tables = hotbed.EmbeddingTables({"user": hotbed.Table(10, 4), "ad": hotbed.Table(9, 8)}, optimizer, output="concat")
    place, device = common.EmbeddingLocation.HOST, training.ComputeDevice.CPU
    module = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 4, place, device), (9, 8, place, device)],
        optimizer={"rowwise_adagrad": kinds.EXACT_ROWWISE_ADAGRAD, "adagrad": kinds.EXACT_ADAGRAD}[kind],
        learning_rate=0.1,
        eps=1e-8,
    )
    ids = torch.randint(0, 9, (6, 5, 2), generator=torch.Generator().manual_seed(1))
    for step in range(3):
        (tables(ids[step]) ** 2).sum().backward()
    result = module.load_state_dict(state_dict(tables, style="fbgemm"), strict=False)
    assert not result.unexpected_keys
    for step in range(3, 6):
        ours = tables(ids[step])
        theirs = module(ids[step].t().reshape(-1), torch.arange(11))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        (ours**2).sum().backward()
        (theirs**2).sum().backward()
    for name, weight in zip(("user", "ad"), module.split_embedding_weights(), strict=True):
        torch.testing.assert_close(tables.weight(name), weight.detach(), rtol=0, atol=1e-6)
    other = hotbed.EmbeddingTables(tables.tables, optimizer, output="concat", seed=5)
    load_state_dict(other, module.state_dict(), style="fbgemm")
    for name in ("user", "ad"):
        for what, column in tables.states(name).items():
            torch.testing.assert_close(other.states(name)[what], column, rtol=1e-5, atol=1e-6)
