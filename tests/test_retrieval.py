"""Two towers: the loss against a loop over pairs, recall against sets, a planted taste, and the example with its twin."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import hotbed
from hotbed.errors import ConfigError, ShapeError
from hotbed.retrieval import (
    NegativeSampler,
    TwoTower,
    bpr,
    in_batch_softmax,
    log_frequency,
    ranking_at_k,
    recall_at_k,
    write_item_vectors,
)


def test_the_loss_compares_with_the_other_items_of_the_batch():
    torch.manual_seed(0)
    users, items, log_q = torch.randn(6, 4), torch.randn(6, 4), torch.rand(6).log()
    ids = torch.tensor([3, 5, 3, 8, 9, 5])
    found = in_batch_softmax(users, items, ids, log_q, temperature=0.5)
    expected = []
    for row in range(6):
        others = [row, *(column for column in range(6) if ids[column] != ids[row])]
        scores = torch.stack([users[row] @ items[column] / 0.5 - log_q[column] for column in others])
        expected.append(-scores.log_softmax(0)[0])
    torch.testing.assert_close(found, torch.stack(expected).mean())


def test_shapes_and_settings_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"item_ids and log_q \[B\]"):
        in_batch_softmax(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(2))
    with pytest.raises(ConfigError, match="give dim="):
        TwoTower(8, 16)
    with pytest.raises(ConfigError, match="above 0"):
        TwoTower(8, 8, temperature=0.0)
    assert TwoTower(8, 16, hidden=(4,), dim=3)(torch.randn(2, 8), torch.randn(2, 16)).users.shape == (2, 3)


def test_recall_counts_what_a_user_has_not_seen():
    items = torch.eye(4)
    users = torch.tensor([[4.0, 3, 2, 1], [1, 2, 3, 4], [1, 0, 0, 0]])
    assert recall_at_k(users, items, [[1, 3], [0], []], [[0], [], []], k=2) == pytest.approx((0.5 + 0) / 2)
    assert recall_at_k(users, items, [[1, 2], [0], []], [[0], [3, 2], []], k=2) == pytest.approx((1 + 1) / 2)
    with pytest.raises(ShapeError, match="lists for each of 3 users"):
        recall_at_k(users, items, [[1]], [[]], k=2)


@pytest.mark.parametrize("k", [1, 3, 20])
def test_the_order_of_items_counts_in_ndcg(k):
    """Against a loop over ranks."""
    generator = torch.Generator().manual_seed(k)
    users, items = torch.randn(9, 5, generator=generator), torch.randn(12, 5, generator=generator)
    wanted = [torch.randperm(12, generator=generator)[: n % 5].tolist() for n in range(9)]
    seen = [torch.randperm(12, generator=generator)[:n].tolist() for n in range(9)]
    recalls, ndcgs = [], []
    for user in range(9):
        if wanted[user]:
            left = [
                item for item in (users[user] @ items.T).argsort(descending=True).tolist() if item not in seen[user]
            ]
            ranks = [rank for rank, item in enumerate(left[:k]) if item in wanted[user]]
            ideal = sum(1 / math.log2(rank + 2) for rank in range(min(k, len(wanted[user]))))
            recalls.append(len(ranks) / len(wanted[user]))
            ndcgs.append(sum(1 / math.log2(rank + 2) for rank in ranks) / ideal)
    found = ranking_at_k(users, items, wanted, seen, k)
    assert found == pytest.approx((sum(recalls) / len(recalls), sum(ndcgs) / len(ndcgs)))
    assert math.isnan(ranking_at_k(users[:1], items, [[]], [[]], k).ndcg)


def test_bpr_is_the_mean_over_pairs_and_negatives():
    torch.manual_seed(0)
    users, items, negatives = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 2, 3)
    expected = [
        -torch.sigmoid((users[row] @ items[row] - users[row] @ negatives[row, n]) / 0.5).log()
        for row in range(4)
        for n in range(2)
    ]
    torch.testing.assert_close(bpr(users, items, negatives, 0.5), torch.stack(expected).mean())
    with pytest.raises(ShapeError, match=r"negatives \[B, K, D\]"):
        bpr(users, items, negatives[:, 0])
    model = TwoTower(3, 3, hidden=(4,), dim=2, temperature=0.5)
    one = model.items(negatives.flatten(0, 1)).view(4, 2, 2)
    assert torch.equal(model.bpr_loss(users, items, negatives), bpr(model.users(users), model.items(items), one, 0.5))


def test_negatives_are_items_that_the_user_does_not_have():
    pairs = torch.tensor([[0, item] for item in range(99)] + [[1, 5], [1, 5], [3, 0]])
    sampler = NegativeSampler(pairs, 100)
    users = torch.tensor([0, 1, 2, 3]).repeat(500)
    found = sampler.draw(users, 3, torch.Generator().manual_seed(0))
    assert found.shape == (2000, 3)
    assert set(found[users == 0].flatten().tolist()) == {99}
    assert set(found[users == 1].flatten().tolist()) == set(range(100)) - {5}
    assert set(found[users == 2].flatten().tolist()) == set(range(100))
    counts = torch.bincount(found[users == 3].flatten(), minlength=100)
    assert counts[0] == 0
    assert 0.1 < counts[1:].float().std() / counts[1:].float().mean() < 0.4  # 0.26 of equally frequent ones
    assert torch.equal(found, sampler.draw(users, 3, torch.Generator().manual_seed(0)))
    assert sampler.draw(users, 0).shape == (2000, 0)
    assert NegativeSampler(pairs[:0], 7).draw(users, 1).max() == 6


def test_pairs_that_leave_nothing_to_draw_are_refused():
    with pytest.raises(ConfigError, match="user 1 has all 2 items"):
        NegativeSampler(torch.tensor([[0, 1], [1, 0], [1, 1]]), 2)
    with pytest.raises(ConfigError, match=r"items from 1 to 9.*num_items=9"):
        NegativeSampler(torch.tensor([[0, 1], [1, 9]]), 9)
    with pytest.raises(ShapeError, match=r"pairs \[P, 2\]"):
        NegativeSampler(torch.zeros(3, 3, dtype=torch.int64), 9)


def test_item_vectors_are_written_for_an_index(tmp_path):
    vectors = torch.randn(5, 3)
    write_item_vectors(tmp_path / "items.parquet", torch.arange(5) * 10, vectors)
    table = pq.read_table(tmp_path / "items.parquet")
    assert table["id"].to_pylist() == [0, 10, 20, 30, 40]
    assert torch.equal(torch.tensor(table["vector"].to_pylist()), vectors)
    with pytest.raises(ShapeError, match="ids"):
        write_item_vectors(tmp_path / "other.parquet", torch.arange(4), vectors)
    assert not (tmp_path / "other.parquet").exists()


def test_log_frequency_corrects_for_popular_items():
    """Where scores are the true log probabilities, the corrected loss is at rest; else popular items are pushed down."""
    assert log_frequency(torch.tensor([3, 1, 0])).exp().tolist() == pytest.approx([0.6, 0.2, 0.2])
    generator = torch.Generator().manual_seed(0)
    shares = torch.arange(1.0, 301.0).rsqrt()
    shares /= shares.sum()
    push = {}
    for corrected in (True, False):
        scores = shares.log().requires_grad_()
        for some in torch.multinomial(shares, 2048, replacement=True, generator=generator).split(32):
            log_q = shares.log()[some] if corrected else None
            in_batch_softmax(torch.ones(32, 1), scores[some].unsqueeze(1), some, log_q).backward()
        push[corrected] = scores.grad / 64
    assert push[True].norm() < 0.01
    assert push[False].norm() > 0.1
    assert push[False][:10].sum() > 0.2


def example():
    path = Path(__file__).parents[1] / "examples" / "two_tower.py"
    found = importlib.util.spec_from_file_location("two_tower", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, of its Adagrad
def test_the_example_finds_a_planted_taste_as_its_twin_does(tmp_path, capsys):
    """Users and items have one of four tastes; users want the items of their taste that they have not seen."""
    generator = torch.Generator().manual_seed(0)
    lines: dict[str, list[str]] = {"train": [], "test": []}
    for user in range(80):
        items = (torch.randperm(10, generator=generator) * 4 + user % 4).tolist()
        lines["train"].append(" ".join(map(str, [user, *items[:7]])))
        lines["test"].append(" ".join(map(str, [user, *items[7:]])))
    for name, some in lines.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(some) + "\n")
    files = [str(tmp_path / "train.txt"), str(tmp_path / "test.txt")]
    options = ["--dim", "8", "--batch", "32", "--epochs", "12", "--lr", "0.3"]
    out = tmp_path / "items.parquet"
    recall = example().main([*files, *options, "--out", str(out)])
    assert recall > 0.9  # by chance: 20 of 33
    assert pq.read_table(out).num_rows == 40
    assert example().main([*files, *options, "--twin"]) > 0.9
    printed = capsys.readouterr().out
    assert example().main([*files, *options, "--cache", "0.6"]) == recall  # the cache is invisible
    assert capsys.readouterr().out.splitlines()[:12] == printed.splitlines()[:12]
    ranked = [*options, "--negatives", "2"]
    found = example().main([*files, *ranked])
    assert found > 0.9
    assert example().main([*files, *ranked, "--twin"]) > 0.9
    assert example().main([*files, *ranked, "--cache", "0.9"]) == found


def test_rows_of_both_sides_move():
    tables = hotbed.EmbeddingTables({"user": hotbed.Table(5, 4), "item": hotbed.Table(5, 4)})
    before = {name: tables.weight(name).clone() for name in tables.tables}
    pairs = torch.tensor([[0, 1], [2, 3], [4, 1]])
    users, items = tables(pairs).unbind(1)
    TwoTower(4, 4).loss(users, items, pairs[:, 1]).backward()
    moved = {name: (tables.weight(name) != before[name]).any(1).nonzero().view(-1).tolist() for name in before}
    assert moved == {"user": [0, 2, 4], "item": [1, 3]}
