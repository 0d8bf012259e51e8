"""Recorded keys against keys made launch by launch: the same bits, also when backward comes late; bad ids teach nothing."""

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.errors import IdError

pytestmark = pytest.mark.gpu


def batches(count, size=200):
    generator = torch.Generator().manual_seed(0)
    columns = [(torch.rand(count, size, generator=generator) ** 4 * limit).long() for limit in (4000, 30)]
    return list(torch.stack(columns, dim=2).contiguous().cuda())


def make(recorded):
    tables = hotbed.EmbeddingTables({"a": Table(4000, 9), "b": Table(30, 9)}, optim.Adam(lr=0.1), device="cuda")
    if not recorded:
        tables.stop_recording()
    return tables


def test_the_same_bits():
    results = []
    for recorded in (True, False):
        tables, losses = make(recorded), []
        for ids in batches(40):
            loss = tables(ids).pow(2).sum()
            loss.backward()
            losses.append(loss.item())
        results.append((losses, tables.state_dict()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], value) for name, value in results[1][1].items())


def test_backward_may_come_late():
    results = []
    for recorded in (True, False):
        tables, waiting = make(recorded), []
        for ids in batches(40):
            waiting.append(tables(ids).pow(2).sum())
            if len(waiting) == 12:
                for loss in waiting:
                    loss.backward()
                waiting = []
        results.append(tables.state_dict())
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


def test_nothing_is_learned_from_a_bad_id_on():
    tables, loader = make(True), batches(30)
    for ids in loader[:12]:
        tables(ids).sum().backward()
    before = tables.weight("a").clone()
    loader[12][7, 1] = 30

    def go_on():
        for ids in loader[12:]:
            tables(ids).sum().backward()
        tables.state_dict()

    with pytest.raises(IdError, match="id 30 of feature 'b' in sample 7"):
        go_on()
    assert torch.equal(tables.weight("a"), before)
    tables(loader[13]).sum().backward()
    assert not torch.equal(tables.weight("a"), before)
