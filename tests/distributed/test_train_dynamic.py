"""`hotbed train --dynamic` in ranks: kills change nothing, checkpoints go to any number of ranks, models are as any other."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from hotbed.data.embedded import resolve
from hotbed.parallel.world import ALONE, World
from hotbed.run.config_check import read_tree
from hotbed.train.build import build
from tests.distributed.ranks import run_ranks
from tests.distributed.test_train import CHECKPOINT, STEPS, arguments, end_of, hotbed
from tests.distributed.train_ranks import TrainRanks, held

DYNAMIC = ("--dynamic", "--admit", "after 2", "--expire", "unused 20 steps, every 5", "--set", "train.log_every=1000")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that was left alone, all rows in its caches."""
    run = tmp_path_factory.mktemp("ranks") / "whole"
    ranks = TrainRanks(arguments(run, *DYNAMIC, epochs=2), run)
    assert ranks.ended() == [0, 0], ranks.texts()
    assert ranks.texts()[1] == "", "only rank 0 speaks"
    return run


def test_a_killed_rank_changes_nothing_and_small_caches_neither(whole, tmp_path):
    run = tmp_path / "run"
    ranks = TrainRanks(arguments(run, *DYNAMIC, "--cache", "0.4", epochs=2), run, prepare=held)
    ranks.wait_for_checkpoint(run, CHECKPOINT)
    ranks.signal(1, signal.SIGKILL)
    ranks.ended()
    ranks = TrainRanks(["train", "--resume", str(run)], run)
    assert ranks.ended() == [0, 0], ranks.texts()
    assert end_of(run) == end_of(whole)


def test_ids_are_counted_over_all_ranks(whole, tmp_path):
    hotbed(*arguments(tmp_path / "run", *DYNAMIC, "--quiet", epochs=2))
    alone, ranks = (json.loads((one / "summary.json").read_text()) for one in (tmp_path / "run", whole))
    assert {name: counts["seen"] for name, counts in ranks["ids"].items()} == {
        name: counts["seen"] for name, counts in alone["ids"].items()
    }
    assert sum(counts["expired"] for counts in ranks["ids"].values()) > 100
    assert ranks["parameters"]["rows"] == sum(
        len(one) for name, one in load_file(whole / "model/tables.safetensors").items() if name.endswith(".id")
    )
    assert abs(alone["final"]["valid"]["auc"] - ranks["final"]["valid"]["auc"]) < 0.03


def test_a_model_of_ranks_is_evaluated_and_predicts_as_any_other(whole, tmp_path, capsys):
    hotbed("evaluate", str(whole))
    final = json.loads((whole / "summary.json").read_text())["final"]
    assert f"{final['test']['auc']:.4f}" in capsys.readouterr().out
    hotbed("predict", str(whole), "criteo-like:1500", "--out", str(tmp_path / "scores.csv"))
    assert (tmp_path / "scores.csv").read_text().count("\n") > 100


def resumed(run: str):
    """Ids, rows and counts of this rank after it has taken over the newest checkpoint of a run."""
    import torch.distributed as dist

    world = World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD) if dist.is_initialized() else ALONE
    config = read_tree(json.loads((Path(run) / "config.json").read_text()))
    training = build(config, resolve("criteo-like:1500"), Path(run), world=world).training
    training.resume()
    tables = training.learner.tables
    assert tables.num_updates == training.progress.step == STEPS
    shared = {name: tables.shared_row(name)["weight"].numpy() for name in tables.tables}
    return {name: tables.rows(name) for name in tables.tables}, shared, training.ids()


@pytest.mark.parametrize("where", ["memory", "ssd"])
def test_a_checkpoint_of_two_ranks_goes_into_one_and_three(tmp_path, where):
    run = tmp_path / "run"
    below = () if where == "memory" else ("--memory", "1MiB", "--ssd", f"{tmp_path / 'ssd'}:64MiB")
    ranks = TrainRanks(arguments(run, *DYNAMIC, *below, "--set", "train.keep_best=false", epochs=1), run)
    assert ranks.ended() == [0, 0], ranks.texts()
    model = load_file(run / "model/tables.safetensors")
    counts = json.loads((run / "summary.json").read_text())["ids"]
    for found in ([resumed(str(run))], run_ranks(resumed, 3, str(run))):
        for name in counts:
            ids = torch.cat([rows[name][0] for rows, _, _ in found])
            weight = torch.cat([rows[name][1]["weight"] for rows, _, _ in found])[ids.argsort()]
            assert np.array_equal(ids.sort().values.numpy(), model[f"{name}.id"]), name
            assert np.array_equal(weight.numpy(), model[f"{name}.weight"]), name
            assert all(np.array_equal(shared[name], model[f"{name}.shared"]) for _, shared, _ in found), name
        assert all(told == counts for _, _, told in found)
