"""Learning rates from outside, and clipping rows together with dense weights: against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import hotbed
from hotbed import Jagged, Table, checkpoint
from hotbed.errors import ConfigError, HotbedError

IDS = torch.tensor([[1, 2], [1, 3], [4, 3]])


def tables_of(lr=0.5, **options):
    tables = {"a": Table(6, 3), "b": Table(6, 3)}
    return hotbed.EmbeddingTables(tables, hotbed.optim.SGD(lr=lr), **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.1),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=7, cycle_momentum=False),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)], [3]
        ),
    ],
)
def test_a_torch_scheduler_drives_the_rate_of_rows(make):
    """Rows move as the weights of nn.Embedding with torch's SGD under the same scheduler."""
    tables, twin = tables_of(), nn.Embedding(6, 3)
    twin.weight.data.copy_(tables.weight("a"))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    ours, theirs = make(tables.rates), make(optimizer)
    for _ in range(6):
        tables(IDS)[:, 0].square().sum().backward()
        optimizer.zero_grad()
        twin(IDS[:, 0]).square().sum().backward()
        optimizer.step()
        tables.rates.step()
        ours.step()
        theirs.step()
        assert tables.rates.param_groups[0]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
        torch.testing.assert_close(tables.weight("a"), twin.weight.detach())


def test_a_scheduler_resumes():
    tables = tables_of()
    scheduler = lr_scheduler.StepLR(tables.rates, 1, 0.5)
    tables.rates.step()
    scheduler.step()
    saved = copy.deepcopy((scheduler.state_dict(), tables.rates.state_dict()))
    other = tables_of()
    again = lr_scheduler.StepLR(other.rates, 1, 0.5)
    other.rates.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    assert other.lr_factor == tables.lr_factor == 0.5
    other.rates.step()
    again.step()
    assert other.lr_factor == 0.25


@pytest.mark.parametrize("way", ["checkpoint", "state_dict"])
def test_a_scheduler_resumes_with_the_rate_that_was_saved_with_the_rows(way, tmp_path):
    """As a script does: the scheduler is made, then everything is loaded."""
    tables = tables_of()
    scheduler = lr_scheduler.StepLR(tables.rates, 2, 0.1)
    for _ in range(3):
        tables.rates.step()
        scheduler.step()
    checkpoint.save(tmp_path, tables)
    other = tables_of()
    again = lr_scheduler.StepLR(other.rates, 2, 0.1)
    if way == "checkpoint":
        checkpoint.load(tmp_path, other)
    else:
        other.load_state_dict(tables.state_dict())
    again.load_state_dict(scheduler.state_dict())
    for _ in range(3):
        for rates, each in ((tables.rates, scheduler), (other.rates, again)):
            rates.step()
            each.step()
        assert other.lr_factor == pytest.approx(tables.lr_factor)


def test_set_lr():
    tables = tables_of(lr=0.5)
    tables.set_lr(0.125)
    assert tables.lr_factor == 0.25
    before = tables.weight("a").clone()
    tables(IDS)[:, 0].sum().backward()
    torch.testing.assert_close(tables.weight("a")[4], before[4] - 0.125)
    with pytest.raises(ConfigError, match="0 or more"):
        tables.set_lr(-1.0)
    with pytest.raises(ConfigError, match="an optimizer with a fixed lr"):
        tables_of(lr=0.0).set_lr(0.1)
    assert copy.deepcopy(tables).rates.param_groups[0]["lr"] == 0.125


def twin_of(tables):
    return nn.ModuleDict(
        {name: nn.EmbeddingBag.from_pretrained(tables.weight(name).clone(), freeze=False, mode="sum") for name in "ab"}
    )


@pytest.mark.parametrize("way", [{}, {"cache": 0.9}, {"output": "concat"}, {"output": "dict"}])
@pytest.mark.parametrize("max_norm", [0.7, 1e6])
def test_rows_and_dense_weights_are_clipped_by_one_norm(way, max_norm):
    """As torch does with the tables among its parameters: repeated ids in one gradient, over two batches, in bags."""
    tables = tables_of(**way).accumulate()
    twin, dense = twin_of(tables), nn.Linear(3, 1)
    other = copy.deepcopy(dense)
    bag = Jagged(torch.tensor([1, 1, 5]), torch.tensor([0, 2, 2, 3]))

    def loss_of(vectors, head):
        return head(vectors).square().sum() * 3 + vectors.sum()

    for _ in range(2):
        out = tables({"a": bag, "b": IDS[:, 1]})
        split = out if isinstance(out, dict) else dict(zip("ab", out.view(3, 2, 3).unbind(1)))
        loss_of(split["a"] + 2 * split["b"], dense).backward()
        ours = twin["a"](bag.values, bag.offsets[:-1]) + 2 * twin["b"](IDS[:, 1:])
        loss_of(ours, other).backward()
    norm = tables.clip_grad_norm(max_norm, dense.parameters())
    expected = nn.utils.clip_grad_norm_([*twin.parameters(), *other.parameters()], max_norm)
    torch.testing.assert_close(norm.float(), expected)
    torch.testing.assert_close(dense.weight.grad, other.weight.grad)
    tables.step()
    for name in "ab":
        moved = twin[name].weight.detach() - 0.5 * twin[name].weight.grad
        torch.testing.assert_close(tables.weight(name), moved, rtol=1e-5, atol=1e-6)


def test_mean_pooling_padding_hashing_and_sequences_count_as_rows_see_them():
    tables = hotbed.EmbeddingTables(
        {
            "m": Table(4, 2, "mean", padding_id=0),
            "h": Table(3, 2, hashing=True),
            "s": Table(4, 2, "none"),
        },
        hotbed.optim.SGD(lr=1.0),
    ).accumulate()
    before = {name: tables.weight(name).clone() for name in tables.tables}
    sequence = Jagged(torch.tensor([1, 1, 2]), torch.tensor([0, 2, 3]))
    out = tables({"m": torch.tensor([[1, 0, 2], [1, 1, 3]]), "h": torch.tensor([1, 4]), "s": sequence})
    sum((one * (n + 1)).sum() for n, one in enumerate(out.values())).backward()
    norm = float(tables.clip_grad_norm(1e9))
    tables.step()
    moved = sum(float((tables.weight(name) - before[name]).double().square().sum()) for name in before)
    assert norm == pytest.approx(moved**0.5, rel=1e-6)


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("padding", [-1, 0, 5])
def test_padding_of_hashed_ids_is_what_lookups_leave_out(padding, pooling):
    """The id itself is padding, before it is hashed; others that share its row count."""
    declared = {"a": Table(3, 2, pooling, padding_id=padding, hashing=True)}
    tables = hotbed.EmbeddingTables(declared, hotbed.optim.SGD(lr=1.0), output="dict").accumulate()
    before = tables.weight("a").clone()
    out = tables({"a": torch.tensor([[1, -1, 3], [5, 7, 0]])})["a"]
    (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum().backward()
    norm = float(tables.clip_grad_norm(1e9))
    tables.step()
    assert norm == pytest.approx(float((tables.weight("a") - before).norm()))


def test_a_sequence_without_ids_can_be_clipped():
    declared = {"s": Table(3, 2, "none"), "b": Table(3, 2)}
    tables = hotbed.EmbeddingTables(declared, hotbed.optim.SGD(lr=1.0), output="dict").accumulate()
    empty = Jagged(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0]))
    out = tables({"s": empty, "b": torch.tensor([1])})
    (out["s"].sum() + out["b"].sum()).backward()
    assert float(tables.clip_grad_norm(1.0)) == pytest.approx(2**0.5)


def test_one_dense_weight_is_clipped_as_several_are():
    """As torch.nn.utils.clip_grad_norm_, which takes a tensor or several."""
    tables, weight = tables_of().accumulate(), nn.Parameter(torch.ones(3))
    (tables(IDS).sum() + 3 * weight.sum()).backward()
    rows = float(tables.clip_grad_norm(1e9))
    both = float(tables.clip_grad_norm(1e9, weight))
    assert both == pytest.approx((rows**2 + 27) ** 0.5)


def test_a_scaled_loss_is_clipped_after_it_was_unscaled():
    tables = tables_of().accumulate()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(tables(IDS).sum()).backward()
    scaler.unscale_(tables)
    norm = tables.clip_grad_norm(1e9)
    plain = tables_of().accumulate()
    plain(IDS).sum().backward()
    torch.testing.assert_close(norm, plain.clip_grad_norm(1e9))


def test_what_cannot_be_clipped():
    with pytest.raises(HotbedError, match=r"call tables.accumulate\(\) before"):
        tables_of().clip_grad_norm(1.0)
    with pytest.raises(ConfigError, match="max_norm must be above 0"):
        tables_of().accumulate().clip_grad_norm(0.0)
    assert float(tables_of().accumulate().clip_grad_norm(1.0)) == 0.0


def test_frozen_tables_do_not_count_when_gradients_are_clipped():
    norms = []
    for frozen in (False, True):
        tables = hotbed.EmbeddingTables(
            {"a": Table(10, 4), "b": Table(10, 4, frozen=frozen)}, hotbed.optim.SGD(lr=1.0), output="dict"
        )
        tables.accumulate()
        found = tables({"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])})
        (found["a"].sum() + 100 * found["b"].sum()).backward()
        norms.append(float(tables.clip_grad_norm(1.0)))
    assert norms == pytest.approx([(8 * (1 + 100**2)) ** 0.5, 8**0.5])
