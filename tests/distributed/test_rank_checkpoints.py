"""Checkpoints of ranks under `hotbed checkpoint prune` and `diff`, and as the start of other runs."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from hotbed.checkpoint.layouts import entries_of, steps_of
from hotbed.data.embedded import resolve
from hotbed.errors import RunError
from hotbed.parallel.world import ALONE, World
from hotbed.run.config_check import read_tree
from hotbed.train.build import build
from hotbed.train.warm_start import source_of, start_from
from tests.distributed.ranks import run_ranks
from tests.distributed.test_train import STEPS, arguments, hotbed
from tests.distributed.train_ranks import TrainRanks

MIXED = ("--set", "tables.dynamic=[C3, C4]", "--admit", "after 2", "--set", "train.keep_best=false")
BELOW = ("--memory", "1MiB", "--ssd")


@pytest.fixture(scope="module", params=["memory", "ssd"])
def run(request, tmp_path_factory):
    """Two ranks, some tables with dynamic ids."""
    folder = tmp_path_factory.mktemp("checkpoints")
    below = () if request.param == "memory" else (*BELOW, f"{folder / 'ssd'}:64MiB")
    given = arguments(folder / "run", *MIXED, *below, "--set", "train.keep_checkpoints=9", epochs=1)
    ranks = TrainRanks(given, folder / "run")
    assert ranks.ended() == [0, 0], ranks.texts()
    return folder / "run"


def test_prune_keeps_what_all_ranks_have(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    before = list(steps_of(copy / "checkpoints", 2))
    assert len(before) >= 2  # one is left out while another is written
    shutil.rmtree(copy / f"checkpoints/rank-1-of-2/{before[-1]:012}")  # it was lost while rank 0 wrote on
    hotbed("checkpoint", "prune", str(copy), "--keep", "1", "--dry-run")
    assert list(steps_of(copy / "checkpoints", 2)) == before[:-1]
    hotbed("checkpoint", "prune", str(copy), "--keep", "1")
    assert "removed" in capsys.readouterr().out
    assert before[-2] in steps_of(copy / "checkpoints", 2)
    assert (copy / f"checkpoints/rank-0-of-2/{before[-1]:012}").exists(), "newer ones stay"
    hotbed("checkpoint", "verify", str(copy))
    with pytest.raises(SystemExit):
        main_with("checkpoint", "prune", str(copy / "checkpoints/rank-0-of-2"), "--keep", "1")


def main_with(*given):
    from hotbed.cli import main

    main(list(given))


def test_diff_of_ranks(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    hotbed("checkpoint", "diff", str(run), str(run))
    lines = capsys.readouterr().out.splitlines()
    assert "of all 2 ranks" in lines[0]
    if not (run.parent / "ssd").exists():  # files of an ssd are not compared
        rows = load_file(run / "model/tables.safetensors")
        counts = next(line for line in lines if " C3 " in line).replace("│", " ").replace(",", "").split()
        assert int(counts[1]) >= len(rows["C3.id"]) > 100
        assert counts[2:5] == ["0", "0", "0"]


def started(run: str, out: str):
    """Rows and shared rows of a run that began with another's."""
    import torch.distributed as dist

    world = World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD) if dist.is_initialized() else ALONE
    tree = json.loads((Path(run) / "config.json").read_text())
    tree["tables"] |= {"memory": "", "ssd": ""}
    dataset = resolve("criteo-like:1500")
    Path(out).mkdir(exist_ok=True)
    learner = build(read_tree(tree), dataset, Path(out), world=world).training.learner
    carried = start_from(source_of(Path(run), Path(out)), Path(out), learner, dataset)
    tables = learner.tables
    rows = {name: tables.rows(name) for name in tables.tables}
    return rows, {name: tables.shared_row(name) for name in tables.tables}, carried


@pytest.mark.parametrize("world", [1, 3])
def test_a_warm_start_takes_the_rows_of_all_ranks(run, tmp_path, world):
    given = str(run), str(tmp_path / "new")
    found = [started(*given)] if world == 1 else run_ranks(started, world, *given)
    model = load_file(run / "model/tables.safetensors")
    for name in found[0][0]:
        ids = torch.cat([rows[name][0] for rows, _, _ in found])
        weight = torch.cat([rows[name][1]["weight"] for rows, _, _ in found])[ids.argsort()]
        assert np.array_equal(weight.numpy(), model[f"{name}.weight"]), name
        if name in ("C3", "C4"):
            assert np.array_equal(ids.sort().values.numpy(), model[f"{name}.id"])
            assert all(np.array_equal(shared[name]["weight"], model[f"{name}.shared"]) for _, shared, _ in found)
            assert found[0][2].rows[name] == len(ids)
    assert found[0][2].dense == len(load_file(run / "model/dense.safetensors"))


def test_the_part_of_one_rank_is_no_start(run):
    with pytest.raises(RunError, match=r"holds the rows of one rank alone\. Give .*run, which"):
        entries_of(run / "checkpoints/rank-0-of-2" / f"{STEPS:012}")
    with pytest.raises(RunError, match="one rank alone"):
        entries_of(run / "checkpoints/rank-1-of-2")
