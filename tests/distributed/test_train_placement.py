"""`hotbed train` with tables placed in other ways: the same rows, and checkpoints that go to any number of ranks and back."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from hotbed.checkpoint.layouts import entries_of
from hotbed.checkpoint.read import refuse_slices
from hotbed.data.embedded import resolve
from hotbed.errors import ConfigError, RunError
from hotbed.optim import Adagrad
from hotbed.parallel.world import World
from hotbed.run.config_check import read_tree
from hotbed.tables.sizing.fit import amounts_of
from hotbed.tables.spec import Table
from hotbed.train.build import build
from hotbed.train.build_ranks import own_rows
from tests.distributed.ranks import run_ranks
from tests.distributed.test_rank_checkpoints import started
from tests.distributed.test_train import STEPS, arguments, hotbed
from tests.distributed.train_ranks import TrainRanks

MIXED = "row, C1=table, C2=column, C5=column, C9=table"
KEPT = ("--set", "train.keep_best=false", "--set", "model.dim=5")  # DeepFM reads one column more


def trained(run, placement, *extra, epochs=1, world=2):
    given = arguments(run, "--set", f"parallel.placement={placement}", *KEPT, *extra, epochs=epochs)
    ranks = TrainRanks(given, run, world)
    assert ranks.ended() == [0] * world, ranks.texts()
    return run


@pytest.fixture(scope="module")
def by_row(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("places") / "row", "row")


@pytest.fixture(scope="module", params=["memory", "ssd"])
def mixed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    below = () if request.param == "memory" else ("--memory", "1MiB", "--ssd", f"{folder / 'ssd'}:64MiB")
    return trained(folder / "mixed", MIXED, *below)


def assert_same_model(run, other):
    rows, wanted = (load_file(one / "model/tables.safetensors") for one in (run, other))
    assert rows.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert np.array_equal(rows[name], weight), name


def test_placements_train_the_same_model(by_row, mixed):
    assert_same_model(mixed, by_row)


@pytest.mark.parametrize("placement", ["table", "column"])
def test_all_tables_alike_behind_a_cache(by_row, tmp_path, placement):
    assert_same_model(trained(tmp_path / "run", placement, "--cache", "0.5"), by_row)


def test_one_process_finds_the_rows_of_all_ranks(mixed):
    config = read_tree(json.loads((mixed / "config.json").read_text()))
    if config.tables.ssd:
        tree = json.loads((mixed / "config.json").read_text())
        tree["tables"] |= {"memory": "", "ssd": ""}
        config = read_tree(tree)
    training = build(config, resolve("criteo-like:1500"), mixed).training
    training.resume()
    rows = load_file(mixed / "model/tables.safetensors")
    for name in training.learner.tables.tables:
        assert np.array_equal(training.learner.tables.weight(name).numpy(), rows[f"{name}.weight"]), name


def in_halves(run, first, second):
    trained(run, first, "--set", f"train.max_steps={STEPS // 2}")
    resumed = ["train", "--resume", str(run), "--set", f"parallel.placement={second}", "--set", "train.max_steps=0"]
    ranks = TrainRanks(resumed, run)
    assert ranks.ended() == [0, 0], ranks.texts()
    return ranks.texts()[0]


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    run = tmp_path_factory.mktemp("places") / "halves"
    assert "placed otherwise" not in in_halves(run, "row", "row")
    return run


@pytest.mark.parametrize("places", [("row", MIXED), (MIXED, "table"), ("table", "column"), ("column", "row")], ids=str)
def test_a_run_continues_with_another_placement(halves, tmp_path, places):
    """Half of it with each: the rows are those of a run that kept to one, with optimizer state and all."""
    said = in_halves(tmp_path / "run", *places)
    assert "with tables placed otherwise on the ranks" in said
    assert_same_model(tmp_path / "run", halves)


@pytest.mark.parametrize("world", [1, 2])
def test_a_warm_start_joins_columns(mixed, tmp_path, world):
    given = str(mixed), str(tmp_path / "new")
    found = [started(*given)] if world == 1 else run_ranks(started, world, *given)
    model = load_file(mixed / "model/tables.safetensors")
    for name in found[0][0]:
        parts = [rows[name] for rows, _, _ in found]
        weights = [columns["weight"].numpy() for _, columns in parts]
        ids = np.concatenate([ids.numpy() for ids, _ in parts])
        is_sliced = weights[0].shape[1] < model[f"{name}.weight"].shape[1]
        assert is_sliced == (world > 1 and name in ("C2", "C5"))
        weight = np.concatenate(weights, axis=1) if is_sliced else np.concatenate(weights)[ids.argsort()]
        assert np.array_equal(weight, model[f"{name}.weight"]), name


def test_an_export_joins_columns_and_others_say_that_they_do_not(mixed, tmp_path):
    entries = entries_of(mixed)
    with pytest.raises(RunError, match=r"rows by column.*tables C2, C5.*a comparison reads.*hotbed export"):
        refuse_slices(entries, "a comparison")
    folder = mixed / "checkpoints"
    hotbed("export", str(folder), "--out", str(tmp_path / "export"))
    assert (tmp_path / "export").is_dir()


def test_a_plan_counts_the_rank_with_most():
    tables = {"a": Table(900, 8), "b": Table(101, 8), "c": Table(30, 8)}
    record = 4 * 16  # weights and their Adagrad state

    def planned(*places):
        placed = {name: replace(one, placement=place) for (name, one), place in zip(tables.items(), places)}
        own = own_rows(placed, Adagrad(), "fp32", World(0, 2))
        return amounts_of(own, Adagrad()).whole

    assert planned("row", "row", "row") == (450 + 51 + 15) * record
    assert planned("table", "table", "table") == 900 * record
    assert planned("column", "column", "column") == 1031 * record // 2
    assert planned("row", "table", "column") == (450 + 101 + 15) * record


def test_mistakes_are_reported():
    tree = {"data": {"path": "criteo-like:1500"}, "parallel": {"placement": "row, nowhere=table"}}
    with pytest.raises(ConfigError, match=r"parallel.placement: no table nowhere; there are C1"):
        build(read_tree(tree), resolve("criteo-like:1500"), None)
    with pytest.raises(ConfigError, match=r"parallel.placement: must be row, table or column"):
        read_tree({"parallel": {"placement": "columns"}})
