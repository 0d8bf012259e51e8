"""The `parallel` section of a run: how ranks come by rows changes no bit of its end, and mistakes are told together."""

import json

import pytest

from hotbed.errors import ConfigError
from hotbed.host.topology import cores_text, find_machine, place_ranks
from hotbed.parallel.world import World
from hotbed.run.config_check import read_tree
from hotbed.train.build_ranks import rank_problems
from tests.distributed.test_train import arguments, end_of
from tests.distributed.train_ranks import TrainRanks


def trained(run, *sets, world=2):
    given = [part for one in ("tables.lr=0.5", *sets) for part in ("--set", one)]  # the second epoch is worse
    ranks = TrainRanks(arguments(run, *given, epochs=2), run, world)
    assert ranks.ended() == [0] * world, ranks.texts()
    return ranks.texts()[0]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    run = tmp_path_factory.mktemp("ways") / "sharded"
    text = trained(run)
    assert "when replicated" not in text
    assert text.count("ranks are ") == 1, "whether ranks are bound is told"
    assert json.loads((run / "summary.json").read_text())["best_epoch"] == 1
    return run


@pytest.mark.parametrize("mode", ["replicated", "auto"])
def test_modes_end_alike_also_where_the_best_weights_come_back(sharded, tmp_path, mode):
    text = trained(tmp_path / "run", f"parallel.mode={mode}", "tables.cache=0.5", "parallel.local_ranks=1")
    assert end_of(tmp_path / "run") == end_of(sharded)
    assert ("when replicated" in text) == (mode == "auto"), "what was chosen is told"
    modes = json.loads((tmp_path / "run" / "summary.json").read_text())["modes"]
    assert [one["said"] in text for one in modes] == ([True] if mode == "auto" else [])


def test_ranks_bound_to_shares_of_the_cores_end_alike_and_it_is_said_once(sharded, tmp_path):
    text = trained(tmp_path / "run", "parallel.bind=true")
    assert end_of(tmp_path / "run") == end_of(sharded)
    machine = find_machine()
    shares = [cores_text(place.cores) for place in place_ranks(machine, 2, bind=True).ranks]
    said = f"local rank 0: cores {shares[0]}" if len(machine.cores) > 1 else "ranks are not bound to cores"
    assert text.count(said) == 1


def test_rows_that_cross_once_train_a_run(tmp_path):
    ends = []
    for once in ("false", "true"):
        sets = "parallel.local_ranks=2", "tables.cache=0.5", f"parallel.once_per_node={once}"
        trained(tmp_path / once, *sets, world=4)
        ends.append([line["loss"] for line in end_of(tmp_path / once)["lines"] if "loss" in line])
    assert ends[0]
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)  # sums of gradients round otherwise


def test_replicas_that_do_not_fit_are_refused_before_training(tmp_path):
    given = [
        part
        for one in ("parallel.mode=replicated", "parallel.replicas=0.01", "tables.hbm=256KiB")
        for part in ("--set", one)
    ]
    ranks = TrainRanks(arguments(tmp_path / "run", *given, epochs=1), tmp_path / "run", 2)
    assert ranks.ended() == [3, 3], ranks.texts()
    said = " ".join("".join(ranks.texts()).split())  # one of them speaks for all
    assert "of all ranks, needs" in said
    assert "replicas of them at every rank" in said


def test_traffic_in_16_bits_is_close_and_not_the_same(sharded, tmp_path):
    trained(tmp_path / "run", "parallel.traffic=bf16")
    exact, narrow = (end_of(run)["lines"][0]["loss"] for run in (sharded, tmp_path / "run"))  # of the first steps
    assert exact != narrow
    assert abs(exact - narrow) < 0.01 * exact


def test_mistakes_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        read_tree({"parallel": {"mode": "shared", "traffic": "fp8", "local_ranks": -1, "locals": 2, "bind": "yes"}})
    text = str(caught.value)
    assert text.startswith("5 settings are wrong:")
    for path in ("mode", "traffic", "local_ranks", "locals", "bind"):
        assert f"- parallel.{path}: " in text
    assert "'shared'" in text


def test_what_ranks_cannot_do_is_reported_together():
    given = {
        "parallel": {"mode": "replicated", "local_ranks": 2, "once_per_node": True},
        "tables": {"decay_scope": "table"},
    }
    problems = rank_problems(read_tree(given | {"data": {"batch_size": 2}}), World(0, 3))
    assert [one.partition(":")[0] for one in problems] == [
        "data.batch_size",
        "data.eval_batch_size",
        "parallel.local_ranks",
        "parallel.mode",
        "parallel.once_per_node",
    ]
    assert "must divide the 3 ranks, not 2" in problems[2]
    assert rank_problems(read_tree(given), World(0, 1)) == [], "one process makes no use of it"
