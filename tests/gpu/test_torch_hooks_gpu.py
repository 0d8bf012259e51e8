"""Loss scaling, compiling, default devices and freeing on CUDA: backward has a thread of its own, and steps are recorded."""

import gc
import weakref

import pytest
import torch
from torch import nn

import hotbed

pytestmark = pytest.mark.gpu
KEPT = {"plain": {}, "cached": {"cache": 0.5}, "dynamic": {"hbm": "1MiB"}}
ROWS, STEPS = 2000, 40


def make(kept):
    rows = None if kept == "dynamic" else ROWS
    tables = {name: hotbed.Table(rows, 16) for name in ("a", "b")}
    return hotbed.EmbeddingTables(tables, hotbed.optim.Adagrad(lr=0.1), device="cuda", **KEPT[kept])


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(ROWS, (100, 2), generator=generator, device="cpu").cuda() for _ in range(STEPS)]


def rows_of(tables):
    return [tables.rows(name)[1]["weight"].cpu().clone() for name in tables.tables]


def train(tables, scaler=None, overflows=(), skip=()):
    torch.manual_seed(0)
    dense = nn.Linear(32, 1, device="cpu").cuda()
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    given = [ids for n, ids in enumerate(batches()) if n not in skip]
    for n, ids in enumerate(hotbed.prefetch(given, tables)):
        optimizer.zero_grad()
        loss = dense(tables(ids).flatten(1)).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss * torch.inf if n in overflows else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return tables


@pytest.mark.parametrize("kept", ["plain", "cached"])
def test_a_scaled_loss_trains_rows_as_the_loss_itself(kept):
    plain = train(make(kept), skip=(11, 30))
    scaler = torch.amp.GradScaler("cuda")
    scaled = train(make(kept), scaler, overflows=(11, 30))
    assert scaled.num_updates == STEPS - 2
    assert scaler.get_scale() == 2.0**14
    for ours, theirs in zip(rows_of(scaled), rows_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kept", KEPT)
def test_a_default_device_changes_no_row(kept):
    wanted = rows_of(train(make(kept)))
    torch.set_default_device("cuda")
    try:
        found = rows_of(train(make(kept)))
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kept", KEPT)
def test_deleted_tables_are_freed_at_once(kept, ahead):
    tables = make(kept)
    if ahead:
        train(tables)
    else:
        for ids in batches():
            tables(ids).sum().backward()
    gc.collect()
    gc.disable()
    try:
        parts = [weakref.ref(part) for part in (tables, *tables.groups, *(group.records for group in tables.groups))]
        del tables
        assert [part() for part in parts if part() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
def test_a_whole_step_compiled(kept):
    torch._dynamo.reset()
    plain, compiled = make(kept), make(kept)

    @torch.compile(backend="aot_eager")
    def step(ids):
        compiled(ids).square().sum().backward()

    for ids in batches():
        plain(ids).square().sum().backward()
        step(ids)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(rows_of(compiled), rows_of(plain), strict=True))
    torch._dynamo.reset()
