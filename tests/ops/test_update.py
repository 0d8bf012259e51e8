import dataclasses

import pytest
import torch

from hotbed import optim
from hotbed.ops.records import layout_of
from hotbed.ops.update import reference, settings_of, update
from tests.ops.cases import random_bags, random_matrix

ROWS = [1, 10, 300]
OPTIMIZERS = [
    optim.SGD(lr=0.1),
    optim.Adagrad(lr=0.1, initial_sum=0.1),
    optim.RowwiseAdagrad(lr=0.1),
    optim.Adam(lr=0.1),
    optim.FTRL(lr=0.1, l1=0.01, ridge=0.1),
]
VARIANTS = [
    {},
    {"l2": 0.1},
    {"weight_decay": 0.1, "clip_norm": 0.5},
    {"scale_by_count": True},
    {"l2": 0.1, "decay_scope": "table"},
    {"decay_scope": "table"},
]


def start(optimizer, dim, generator, dtype=torch.float32):
    layout = layout_of(dim, optimizer)
    records = torch.rand(sum(ROWS), layout.width, generator=generator, dtype=dtype)
    for state in layout.row_states:
        records[:, layout.columns(state)] = torch.randint(0, 5, (sum(ROWS), 1), generator=generator).to(dtype)
    return layout, records


@pytest.mark.parametrize("make", [random_matrix, random_bags])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.rule.name)
def test_compiled_equals_reference(optimizer, variant, make):
    optimizer = dataclasses.replace(optimizer, **variant)
    for dim, batch in [(1, 3), (16, 63), (5, 1000), (33, 0)]:
        generator = torch.Generator().manual_seed(dim + batch)
        lookups, tables = make(ROWS, batch, generator)
        layout, records = start(optimizer, dim, generator)
        grad = torch.randn(lookups.num_out, dim, generator=generator)
        settings = settings_of(optimizer, 0.1, tables)
        expected, exact, actual = records.clone(), records.double(), records.clone()
        reference.update(expected, layout, grad, lookups, settings)
        double = lookups if lookups.scale is None else lookups.with_scale(lookups.scale.double())
        reference.update(exact, layout, grad.double(), double, settings)
        update(actual, layout, grad, lookups, settings)
        used = dim * (1 + len(layout.element_states)) + len(layout.row_states)
        torch.testing.assert_close(actual[:, :used], expected[:, :used], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(actual[:, :used].double(), exact[:, :used], rtol=2e-4, atol=2e-4)
        assert torch.equal(actual[:, used:], records[:, used:])  # padding is never written


@pytest.mark.parametrize("scope", ["touched", "table"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.rule.name)
def test_threads_and_parts_do_not_change_a_bit(optimizer, scope, monkeypatch):
    monkeypatch.setattr("hotbed.host.pool.ALONE", 0)
    optimizer = dataclasses.replace(optimizer, decay_scope=scope)
    generator = torch.Generator().manual_seed(0)
    lookups, tables = random_matrix([3, 40, 70], 20_000, generator)  # more than one part per table
    layout = layout_of(9, optimizer)
    records = torch.rand(113, layout.width, generator=generator)
    grad = torch.randn(lookups.num_out, 9, generator=generator)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        copy = records.clone()
        update(copy, layout, grad, lookups, settings_of(optimizer, 0.1, tables))
        results.append(copy)
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_where_a_row_sits_does_not_change_a_bit():
    """Law 1: sums run in the order of the batch, so moving rows to other slots moves the results with them."""
    generator = torch.Generator().manual_seed(1)
    lookups, _ = random_matrix([200], 3000, generator)
    optimizer = optim.Adam(lr=0.01)
    layout = layout_of(6, optimizer)
    records, grad = torch.rand(200, layout.width, generator=generator), torch.randn(3000, 6, generator=generator)
    place = torch.randperm(200, generator=generator)
    moved = torch.empty_like(records)
    moved[place] = records
    elsewhere = lookups._replace(slots=torch.where(lookups.slots >= 0, place[lookups.slots.clamp(min=0)], -1))
    from hotbed.ops.update import TableRows

    settings = settings_of(optimizer, 0.01, (TableRows(0, 200, 0, 1),))
    update(records, layout, grad, lookups, settings)
    update(moved, layout, grad, elsewhere, settings)
    assert torch.equal(moved[place], records)
