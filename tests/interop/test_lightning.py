"""TablesCallback under Lightning's own trainer, against a loop written by hand."""

import importlib.util

import pytest
import torch

import hotbed
from hotbed.errors import ConfigError, RunError
from tests.distributed.ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs Lightning"),
    pytest.mark.filterwarnings("ignore"),  # Lightning's own
]


@pytest.fixture(scope="module")
def pl():
    """Imported by the process that runs these tests, not by all that collect them: it takes seconds."""
    return importlib.import_module("tests.interop.under_lightning")


@pytest.mark.parametrize("every", [1, 3])
def test_rows_move_where_the_optimizer_steps(pl, tmp_path, every):
    tables, whole = pl.new_tables(), pl.new_tables(cache=None)
    _, module = pl.fit(tables, tmp_path / "rows", max_epochs=2, accumulate_grad_batches=every)
    pl.assert_same(tables, module, whole, pl.by_hand(whole, 2, every))
    assert tables.num_updates == 2 * len(pl.BATCHES) / every
    assert tables.accumulation is None  # as it was before


@pytest.mark.parametrize("by_callback", [True, False])
def test_gradients_of_a_fit_that_broke_off_are_dropped(pl, tmp_path, by_callback):
    tables = pl.new_tables()
    if not by_callback:
        tables.accumulate()
    before = tables.weight("a")
    module = pl.Clicks(tables)
    callback = pl.TablesCallback(tables, tmp_path / "rows")
    breaks = pl.BreaksOff(at=2)
    options = {"accumulate_grad_batches": 4, "callbacks": [breaks, callback]}
    with pytest.raises(ValueError, match="broken off"):
        pl.Trainer(accelerator="cpu", max_epochs=1, **pl.QUIET, **options).fit(module, pl.BATCHES)
    assert breaks.num_waiting == 2  # there was something to drop
    assert torch.equal(tables.weight("a"), before)
    assert (tables.accumulation is None) == by_callback
    assert tables.accumulate().step() is False


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_that_overflows_leaves_rows_and_dense_weights(pl, tmp_path, every):
    tables, whole = pl.new_tables(), pl.new_tables(cache=None)
    bad = (4, 5)[:every]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    plugin = pl.MixedPrecision("16-mixed", "cpu", scaler)
    plugin.autocast_context_manager = lambda: torch.autocast("cpu", torch.float16, enabled=False)
    options = {"accumulate_grad_batches": every, "plugins": [plugin]}
    _, module = pl.fit(tables, tmp_path / "rows", overflow_at=bad, max_epochs=1, **options)
    pl.assert_same(tables, module, whole, pl.by_hand(whole, 1, every, left_out=bad))
    assert scaler.get_scale() == 4.0  # it saw the overflow


def test_a_resumed_trainer_ends_with_the_same_bits(pl, tmp_path):
    whole, parts, again = pl.new_tables(), pl.new_tables(), pl.new_tables(cache=0.5)
    _, expected = pl.fit(whole, tmp_path / "whole", max_epochs=3)
    trainer, _ = pl.fit(parts, tmp_path / "parts", max_epochs=2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert sorted(saved["state_dict"]) == ["dense.bias", "dense.weight"]
    trainer, module = pl.fit(again, tmp_path / "parts", max_epochs=3, ckpt_path=tmp_path / "last.ckpt")
    pl.assert_same(again, module, whole, expected)
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    newest = trainer.validate(module, pl.BATCHES, verbose=False)[0]["loss"]
    older = trainer.validate(module, pl.BATCHES, ckpt_path=tmp_path / "last.ckpt", verbose=False)[0]["loss"]
    assert older > newest  # with the rows of that checkpoint
    assert trainer.test(module, pl.BATCHES, ckpt_path=tmp_path / "later.ckpt", verbose=False)[0]["loss"] == newest


def test_a_checkpoint_without_rows_is_refused(pl, tmp_path):
    tables = pl.new_tables()
    trainer, module = pl.fit(tables, tmp_path / "rows", max_epochs=1)
    trainer.save_checkpoint(tmp_path / "dense.ckpt", weights_only=True)
    with pytest.raises(RunError, match=r"dense.ckpt brought dense weights without the rows"):
        trainer.validate(module, pl.BATCHES, ckpt_path=tmp_path / "dense.ckpt", verbose=False)


def test_ranks_under_ddp(pl, tmp_path):
    whole = hotbed.EmbeddingTables({name: hotbed.Table(60, 4) for name in "ab"}, hotbed.optim.SGD(lr=0.1))
    module = pl.by_hand(whole, every=3)
    for vectors, weight in run_ranks(pl.under_ddp, 2, tmp_path):
        torch.testing.assert_close(vectors[:, 0], whole.weight("a"))
        torch.testing.assert_close(weight, module.dense.weight)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["last.ckpt", "rank-0", "rank-1"]


def test_mistakes(pl, tmp_path):
    tables = pl.new_tables()
    module = pl.Clicks(tables)
    module.rows = tables
    trainer = pl.Trainer(accelerator="cpu", callbacks=[pl.TablesCallback(tables, tmp_path)], **pl.QUIET)
    with pytest.raises(ConfigError, match=r"a part of Clicks.*self\._tables = \[tables\]"):
        trainer.fit(module, pl.BATCHES)
    with pytest.raises(ConfigError, match="keep must be 1 or more"):
        pl.TablesCallback(tables, tmp_path, keep=0)
