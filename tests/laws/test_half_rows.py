"""Rows of 16 bits: the cache stays invisible, a resumed run goes on with the same bits, and small steps are not lost."""

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.errors import ConfigError
from tests.laws.test_cache_invisible import DEVICES, OPTIMIZERS, assert_same, random_batches, train

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_cache_is_invisible(name, precision, device):
    batches = random_batches(12, 9)
    plain = train(OPTIMIZERS[name], batches, device=device, precision=precision)
    full = train(OPTIMIZERS[name], batches, device=device)
    assert plain[1]["a.weight"].dtype == TYPES[precision]
    assert not torch.equal(plain[1]["a.weight"].float(), full[1]["a.weight"])
    for ahead in (None, {"window": 2, "look_ahead": 4}):
        cached = train(
            OPTIMIZERS[name], batches, device=device, precision=precision, cache=0.34, policy="lfu", ahead=ahead
        )
        assert_same(plain, cached)
        assert cached[2].counters().evictions > 30


@pytest.mark.parametrize("precision", TYPES)
def test_a_resumed_run_continues_with_the_same_bits(precision):
    def tables():
        return hotbed.EmbeddingTables({"a": Table(30, 7)}, optim.Adagrad(lr=0.1), precision=precision)

    def steps(tables, first, last):
        for step in range(first, last):
            ids = torch.randint(0, 30, (16, 1), generator=torch.Generator().manual_seed(step))
            tables(ids).pow(2).sum().backward()

    whole, before, after = tables(), tables(), tables()
    steps(whole, 0, 8)
    steps(before, 0, 5)
    after.load_state_dict(before.state_dict())
    steps(after, 5, 8)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, after.state_dict()[name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", TYPES)
def test_small_steps_add_up(precision, device):
    """2,000 steps of a tenth of the distance between neighbours move the mean weight as far as float32 rows.

    Rounded to the nearest, not one of them would move a weight at all.
    """
    distance = {"fp16": 2.0**-10, "bf16": 2.0**-7}[precision]
    table = Table(8, 32, init=hotbed.Constant(1.0))
    tables = hotbed.EmbeddingTables({"a": table}, optim.SGD(lr=distance / 10), precision=precision, device=device)
    ids = torch.arange(8, device=device).unsqueeze(1)
    stalled = torch.ones(1, dtype=TYPES[precision])
    for _ in range(2000 if device == "cpu" else 500):
        tables(ids).sum().neg().backward()
        stalled = (stalled.float() + distance / 10).to(stalled.dtype)
    assert stalled.item() == 1.0
    moved = float(tables.weight("a").float().mean()) - 1
    expected = tables.num_updates * distance / 10
    assert abs(moved / expected - 1) < 0.05


def test_the_learned_rows_are_as_good_as_float32():
    """Rows learn a target they start far from; rounding to the nearest after each step stops on the way."""
    generator = torch.Generator().manual_seed(0)
    target = 1 + torch.rand(50, 1, 8, generator=generator)

    def train(precision, nearest=False):
        tables = hotbed.EmbeddingTables(
            {"a": Table(50, 8, init=hotbed.Constant(1.0))}, optim.SGD(lr=0.002), precision=precision
        )
        for _ in range(1500):
            ids = torch.arange(50).unsqueeze(1)
            (tables(ids) - target).pow(2).sum().mul(0.5).backward()
            if nearest:
                tables.weight("a").copy_(tables.weight("a").to(TYPES["bf16"]))
        return float((tables.weight("a").float().unsqueeze(1) - target).pow(2).mean())

    full, nearest = train("fp32"), train("fp32", nearest=True)
    assert full < 1e-3
    assert nearest > 0.1
    assert train("bf16") < full + 2e-4
    assert train("fp16") < full + 2e-5


def test_checkpoints_pass_between_precisions():
    full = hotbed.EmbeddingTables({"a": Table(9, 3)}, optim.Adam())
    half = hotbed.EmbeddingTables({"a": Table(9, 3)}, optim.Adam(), precision="bf16", seed=1)
    full(torch.arange(9).unsqueeze(1)).sum().backward()
    half.load_state_dict(full.state_dict())
    assert torch.equal(half.weight("a"), full.weight("a").bfloat16())
    assert torch.equal(half.states("a")["mean"], full.states("a")["mean"])
    full.load_state_dict(half.state_dict())
    assert torch.equal(full.weight("a"), half.weight("a").float())


def test_records_are_smaller():
    def size(precision):
        return hotbed.EmbeddingTables({"a": Table(100, 64)}, optim.RowwiseAdagrad(), precision=precision).num_bytes

    assert (size("fp32"), size("bf16")) == (100 * 68 * 4, 100 * 36 * 4)


def test_mistakes_are_reported():
    with pytest.raises(ConfigError, match="'fp32', 'fp16', 'bf16', not 'fp8'"):
        hotbed.EmbeddingTables({"a": Table(9, 3)}, precision="fp8")
    tables = hotbed.EmbeddingTables({"a": Table(9, 3)}, precision="fp16")
    with pytest.raises(ConfigError, match="cannot change their type"):
        tables.double()
