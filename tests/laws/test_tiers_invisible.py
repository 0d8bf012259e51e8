"""Laws 1 and 3 with three tiers: 1 % of the rows on the device, 5 % in memory, the rest on an ssd: bits of plain tensors."""

import functools

import pytest
import torch

import hotbed
from hotbed import Table
from hotbed.cache import BYTES_PER_SLOT
from hotbed.ops.records import layout_of
from hotbed.store import tiered
from hotbed.tables.sizing.budget import SSD_BYTES_PER_KEY
from tests.laws.test_cache_invisible import DEVICES, OPTIMIZERS, assert_same

ROWS, DIM, BATCH = 12_000, 6, 40


def batches(count=120, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hot = (torch.rand(count, BATCH, 1, generator=generator) ** 6 * ROWS).long()
    cold = torch.randint(0, ROWS, (count, BATCH, 1), generator=generator)
    return list(torch.cat([hot, cold], dim=2))


def train(name, device, ahead=None, **budgets):
    tables = hotbed.EmbeddingTables(
        {"hot": Table(ROWS // 2, DIM, hashing=True), "cold": Table(ROWS - ROWS // 2, DIM, hashing=True)},
        OPTIMIZERS[name],
        device=device,
        **budgets,
    )
    losses = []
    loader = [ids.to(device) for ids in batches()]
    for ids in loader if ahead is None else hotbed.prefetch(loader, tables, **ahead):
        vectors = tables(ids)
        loss = (vectors.prod(dim=1).tanh() + vectors.sum(dim=1)).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
    return losses, {key: value.cpu().clone() for key, value in tables.state_dict().items()}, tables


@functools.cache
def train_plain(name, device):
    return train(name, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [None, {}, {"window": 2, "look_ahead": 40}], ids=["plain", "ahead", "far"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_tiers_give_the_same_bits(tmp_path, name, ahead, device):
    record = layout_of(DIM, OPTIMIZERS[name]).width * 4
    memory = ROWS * tiered.BYTES_PER_KEY + ROWS // 20 * (record + tiered.BYTES_PER_SLOT)
    tiers = train(name, device, ahead, cache=0.01, memory=memory, ssd=f"{tmp_path}:16MiB")
    assert_same(train_plain(name, device), tiers)
    (group,) = tiers[2].groups
    assert group.num_slots == ROWS // 100
    group.residency.store.check_integrity()
    counts = group.residency.store.counts
    assert counts.from_ssd > 100  # rows that left came back from every tier
    assert counts.from_memory > 100
    assert counts.to_ssd > 1000
    assert tiers[2].counters().evictions > 1000


@pytest.mark.parametrize("ahead", [None, {}], ids=["plain", "ahead"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_over_ssd_without_a_device(tmp_path, name, ahead):
    record = layout_of(DIM, OPTIMIZERS[name]).width * 4
    tiers = train(
        name,
        "cpu",
        ahead,
        memory=ROWS * SSD_BYTES_PER_KEY + ROWS // 20 * (record + BYTES_PER_SLOT),
        ssd=f"{tmp_path}:16MiB",
    )
    assert_same(train_plain(name, "cpu"), tiers)
    assert tiers[2].groups[0].num_slots == ROWS // 20
    assert tiers[2].counters().misses > tiers[2].counters().created


@pytest.mark.parametrize("ahead", [False, True])
def test_an_ssd_that_is_full_stops_the_run_and_says_why(tmp_path, ahead):
    tables = hotbed.EmbeddingTables(
        {"a": Table(20_000, 64)}, OPTIMIZERS["adam"], cache=0.01, memory="512KiB", ssd=f"{tmp_path}:5MiB"
    )
    loader = list(torch.randperm(20_000).view(-1, 100, 1))

    def run():
        for ids in hotbed.prefetch(loader, tables) if ahead else loader:
            tables(ids).sum().backward()

    with pytest.raises(hotbed.errors.StoreError, match=r"(?s)has reached its cap.*Give a larger ssd="):
        run()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 5 << 20
