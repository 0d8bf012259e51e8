"""Settings that are chosen for the size of a log."""

from __future__ import annotations

import pytest

from hotbed.data.schema import IdFeature, Schema, Split
from hotbed.run.config import RunConfig
from hotbed.run.config_check import read_tree
from hotbed.run.defaults import LARGE_LOG, batch_size, choose_settings, epochs, lookups_per_row, row_rate


def log(rows: int, ids: int, valid: int = 100) -> Schema:
    features = tuple(IdFeature(name, ids, distinct=ids - 1) for name in ("user", "item"))
    splits = {"train": Split(("a",), (rows,), rows // 4), "valid": Split(("b",), (valid,), valid // 4)}
    return Schema("label", (), features, splits if valid else {"train": splits["train"]})


def test_a_small_log_gets_small_batches_and_an_early_stop():
    chosen = choose_settings(RunConfig(), (), log(20_000, 1000))
    config = chosen.config
    assert (config.data.batch_size, config.data.eval_batch_size) == (256, 4096)
    assert (config.train.epochs, config.train.patience, config.train.base_rate) == (30, 2, True)
    assert config.train.recalibrate
    assert config.tables.lr == 0.02
    for word in ("20,000", "--batch-size", "--epochs", "--lr", "valid AUC"):
        assert word in chosen.text


def test_a_large_log_is_left_alone():
    assert choose_settings(RunConfig(), (), log(LARGE_LOG, 1000)) == (RunConfig(), {}, "")
    assert choose_settings(RunConfig(), (), log(0, 1000)).config == RunConfig()


def test_whoever_gives_the_batch_size_plans_the_training():
    config = read_tree({"data": {"batch_size": 64}})
    assert choose_settings(config, {"data.batch_size"}, log(20_000, 1000)) == (config, {}, "")


@pytest.mark.parametrize(
    ("given", "tree", "path"),
    [
        ("train.epochs", {"train": {"epochs": 3}}, "train.epochs"),
        ("train.epochs", {"train": {"epochs": 3}}, "train.patience"),
        ("train.max_steps", {"train": {"max_steps": 9}}, "train.epochs"),
        ("tables.lr", {"tables": {"lr": 0.5}}, "tables.lr"),
        ("tables.optimizer", {"tables": {"optimizer": "sgd"}}, "tables.lr"),
        ("train.base_rate", {"train": {"base_rate": False}}, "train.base_rate"),
        ("data.eval_batch_size", {"data": {"eval_batch_size": 9}}, "data.eval_batch_size"),
    ],
)
def test_what_is_given_stays(given, tree, path):
    config = read_tree(tree)
    chosen = choose_settings(config, {given}, log(20_000, 1000))
    assert path not in chosen.values
    section, name = path.split(".")
    assert getattr(getattr(chosen.config, section), name) == getattr(getattr(config, section), name)
    assert chosen.config.data.batch_size == 256


def test_without_a_valid_split_there_are_few_epochs_and_no_patience():
    config = choose_settings(RunConfig(), (), log(20_000, 10_000, valid=0)).config
    assert (config.train.epochs, config.train.patience) == (1, 0)
    assert [epochs(20_000, density, "deepfm", False) for density in (5, 50, 500)] == [1, 2, 4]
    assert epochs(20_000, 5, "lr", False) == 5


def test_batches_of_evaluation_fit_the_cache_of_training():
    config = read_tree({"tables": {"cache": 0.1}})
    assert choose_settings(config, {"tables.cache"}, log(20_000, 1000)).config.data.eval_batch_size == 256


def test_batch_sizes_and_rates_grow():
    sizes = [batch_size(rows) for rows in (1, 20_000, 100_000, 300_000, 1_000_000, 10**9)]
    assert sizes == [256, 256, 256, 1024, 4096, 4096]
    rates = [row_rate(density, 10_000, "deepfm") for density in (0, 1, 20, 63, 200, 1e6)]
    assert rates == [0.02, 0.02, 0.02, 0.035, 0.06, 0.06]
    rates = [row_rate(1000, num_ids, "dnn") for num_ids in (0, 46, 1000, 2000, 4000)]  # few ids are like dense weights
    assert rates == [0.02, 0.02, 0.02, 0.035, 0.06]
    assert [row_rate(density, 46, "lr") for density in (1, 1000)] == [0.03, 0.1]
    assert lookups_per_row(log(1000, 50)) == 20
