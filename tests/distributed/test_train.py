"""`hotbed train` in ranks: all of them as one run, also when one is killed, stopped, hung or given something else."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hotbed.checkpoint.layouts import newest_in, steps_of
from hotbed.cli import main
from hotbed.data.embedded import resolve
from hotbed.run.config_check import read_tree
from hotbed.train.build import build
from tests.distributed.train_ranks import HELD, TrainRanks, held, let_go

CHECKPOINT = 16  # tests wait for the first one: where the disk is slow, later ones are left out
assert CHECKPOINT < HELD
SETTINGS = (
    "data.batch_size=30",
    "data.eval_batch_size=700",
    "model.dim=4",
    "model.options.hidden=[8]",
    "model.options.batch_norm=true",
    "train.device=cpu",
    "train.log_every=9",
    "train.eval_every=50",
    f"train.checkpoint_every={CHECKPOINT}",
    "parallel.timeout=60",
)
TIMES = ("samples_per_s", "steady_samples_per_s", "seconds", "train_seconds", "times", "memory", "cache", "tiers")
STEPS = 50  # of an epoch


def arguments(run, *extra, epochs=3):
    sets = [part for one in SETTINGS for part in ("--set", one)]
    return ["train", "--data", "criteo-like:1500", "--epochs", str(epochs), *sets, "--out", str(run), *extra]


def hotbed(*given):
    """In this process."""
    with pytest.raises(SystemExit) as ended:
        main(list(given))
    assert ended.value.code == 0


def end_of(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    end = {"lines": [{name: one for name, one in line.items() if name not in TIMES} for line in lines]}
    return end | {
        str(path.relative_to(run)): path.read_bytes() for path in (run / "model").rglob("*") if path.is_file()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that was left alone, without a cache."""
    run = tmp_path_factory.mktemp("ranks") / "whole"
    ranks = TrainRanks(arguments(run), run)
    assert ranks.ended() == [0, 0], ranks.texts()
    first, second = ranks.texts()
    assert "test AUC" in first
    assert second == "", "only rank 0 speaks"
    return run


COMMAND = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from hotbed.cli import main
from tests.distributed.train_ranks import held
held()
main(sys.argv[1:])
"""


def test_a_killed_rank_leads_to_a_restart_and_the_same_end_behind_a_cache_too(whole, tmp_path):
    run, log, script = tmp_path / "run", tmp_path / "log.txt", tmp_path / "hotbed.py"
    script.write_text(COMMAND)
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", str(script)]
    command = [sys.executable, "-m", *launch, *arguments(run, "--cache", "0.3")]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 300
    while not (run / f"checkpoints/rank-0-of-2/{CHECKPOINT:012}").exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.002)
    os.kill(rank_of(process.pid, 1), signal.SIGKILL)
    let_go(run)
    assert process.wait(300) == 0, log.read_text()
    assert log.read_text().count("train samples") == 2, (
        "rank 0 begins once more; torchrun may end it before it can complain"
    )
    assert end_of(run) == end_of(whole)


def rank_of(torchrun, number):
    """The process of a rank."""
    for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        if f"\0RANK={number}\0".encode() in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"no rank {number}")


def test_one_process_gives_a_model_about_as_good(whole, tmp_path):
    hotbed(*arguments(tmp_path / "run", "--quiet"))
    alone, ranks = (json.loads((one / "summary.json").read_text()) for one in (tmp_path / "run", whole))
    assert abs(alone["final"]["valid"]["auc"] - ranks["final"]["valid"]["auc"]) < 0.03
    for name in ("samples", "steps", "parameters"):
        assert alone[name] == ranks[name]


def test_a_model_of_ranks_is_evaluated_as_any_other(whole, capsys):
    hotbed("evaluate", str(whole))
    final = json.loads((whole / "summary.json").read_text())["final"]
    assert f"{final['test']['auc']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["list", "verify"])
def test_checkpoints_of_ranks_are_known(whole, capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    hotbed("checkpoint", command, str(whole))
    text = capsys.readouterr().out
    assert f"rank-0-of-2/{3 * STEPS:012}" in text
    assert f"rank-1-of-2/{3 * STEPS:012}" in text
    *earlier, last = map(int, re.search(r"steps that all 2 ranks have: (.*)", text)[1].split(", "))
    assert last == 3 * STEPS
    assert earlier  # one asked for while another is written is left out, so which they are depends on the disk
    assert all(step % CHECKPOINT == 0 for step in earlier)


def test_a_signal_to_one_rank_stops_all_and_others_continue(whole, tmp_path, capsys):
    run = tmp_path / "run"
    ranks = TrainRanks(arguments(run, epochs=9), run, prepare=held)
    ranks.wait_for_checkpoint(run, CHECKPOINT)
    ranks.signal(1, signal.SIGTERM)
    let_go(run)
    assert ranks.ended() == [143, 143], ranks.texts()
    assert "interrupted at step" in ranks.texts()[0]
    saved = newest_in(run / "checkpoints")
    assert saved.world == 2
    epochs = saved.step // STEPS + 2
    three = TrainRanks(
        ["train", "--resume", str(run), "--epochs", str(epochs - 1), "--set", "tables.cache=0.4"], run, 3
    )
    assert three.ended() == [0, 0, 0], three.texts()
    assert "was saved by 2 ranks and continues with 3 ranks" in three.texts()[0]
    assert not (run / "checkpoints/rank-0-of-2").exists()
    hotbed("train", "--resume", str(run), "--epochs", str(epochs))
    assert "was saved by 3 ranks and continues with one process" in capsys.readouterr().err
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"]
    assert (summary["steps"], summary["samples"]) == (STEPS * epochs, 1500 * epochs)
    rows = load_file(run / "model/tables.safetensors")
    assert rows.keys() == load_file(whole / "model/tables.safetensors").keys()
    assert all(np.isfinite(one).all() for one in rows.values())


@pytest.mark.parametrize("where", ["plain", "cache", "ssd"])
def test_one_process_finds_the_rows_of_all_ranks(tmp_path, where):
    run, settings = tmp_path / "run", {"plain": (), "cache": ("--cache", "0.3")}
    settings["ssd"] = ("--memory", "700KiB", "--ssd", f"{tmp_path / 'ssd'}:8MiB")
    ranks = TrainRanks(arguments(run, *settings[where], "--set", "train.keep_best=false", epochs=1), run)
    assert ranks.ended() == [0, 0], ranks.texts()
    config = read_tree(json.loads((run / "config.json").read_text()))
    training = build(config, resolve("criteo-like:1500"), run).training
    training.resume()
    rows, learner = load_file(run / "model/tables.safetensors"), training.learner
    for name in learner.tables.tables:
        assert np.array_equal(learner.tables.weight(name).numpy(), rows[f"{name}.weight"]), name
    dense = load_file(run / "model/dense.safetensors")
    for name, weight in learner.model.state_dict().items():
        assert np.array_equal(weight.numpy(), dense[name]), name
    assert (training.progress.step, training.learner.tables.num_updates) == (STEPS, STEPS)


def test_k_steps_end_the_same_after_a_stop(tmp_path):
    runs = []
    for name in ("whole", "stopped"):
        run = tmp_path / name
        if name == "whole":
            let_go(run)
        ranks = TrainRanks(arguments(run, "--k-step", "4", "--delay", "3"), run, prepare=held)
        if name == "stopped":
            ranks.wait_for_checkpoint(run, CHECKPOINT)
            ranks.signal(0, signal.SIGKILL)
            let_go(run)
            ranks.ended()
            ranks = TrainRanks(["train", "--resume", str(run)], run)
        assert ranks.ended() == [0, 0], ranks.texts()
        runs.append(end_of(run))
    assert runs[0] == runs[1]


def other_seed():
    if os.environ["RANK"] == "1":
        import hotbed.cli.train as command

        config = command.read_config
        command.read_config = lambda file, given, sets: config(file, {**given, "train.seed": 7}, sets)


def test_ranks_with_other_settings_say_so_once(tmp_path):
    ranks = TrainRanks(arguments(tmp_path / "run"), tmp_path / "run", prepare=other_seed)
    assert ranks.ended() == [2, 2]
    text = "".join(ranks.texts())
    assert "all ranks must be given the same, and they differ in:\n  - train.seed: 0 on rank 0, 7 on rank 1\n" in text
    assert text.count("error:") == 1


def at_step_6(does):
    """Rank 1 does something else."""
    from hotbed.train import loop

    step = loop.Training._step

    def changed(self, batch):
        if os.environ["RANK"] == "1" and self.progress.step == 5:
            does()
        step(self, batch)

    loop.Training._step = changed


def failing():
    def fail():
        raise ValueError("something else")

    at_step_6(fail)


def interrupted():
    def interrupt():
        raise KeyboardInterrupt

    at_step_6(interrupt)


def hanging():
    """Rank 0 waits for five seconds and no longer; before that, while ranks start, it is as patient as ever."""
    from hotbed.train import loop

    at_step_6(lambda: time.sleep(1000))
    step = loop.Training._step

    def impatient(self, batch):
        if os.environ["RANK"] == "0" and self.progress.step == 5:
            self.world._pulse.timeout = 5.0
        step(self, batch)

    loop.Training._step = impatient


def test_an_error_on_one_rank_stops_all(tmp_path):
    ranks = TrainRanks(arguments(tmp_path / "run"), tmp_path / "run", prepare=failing)
    assert ranks.ended() == [1, 1]
    first, second = ranks.texts()
    assert first.endswith("error: rank 0 stops because of rank 1: ValueError: something else\n")
    assert second.startswith("error: rank 1: Traceback")
    assert second.endswith("ValueError: something else\n\n")


def test_a_second_ctrl_c_on_one_rank_stops_all(tmp_path):
    ranks = TrainRanks(arguments(tmp_path / "run"), tmp_path / "run", prepare=interrupted)
    assert ranks.ended() == [1, 130]
    first, second = ranks.texts()
    assert first.endswith("error: rank 0 stops because of rank 1: interrupted\n")
    assert second == "error: rank 1: interrupted\n"


def test_a_rank_that_hangs_is_named_with_its_stage(tmp_path):
    ranks = TrainRanks(arguments(tmp_path / "run"), tmp_path / "run", prepare=hanging)
    assert ranks.ended(kept=[1])[0] == 1
    text = "".join(ranks.texts())
    assert "rank 1 is behind, in the stage 'batch of step 6'" in text


def test_a_step_counts_when_all_ranks_have_it(tmp_path):
    for rank, steps in enumerate([(1, 2, 3), (1, 2)]):
        for step in steps:
            (tmp_path / f"rank-{rank}-of-2" / f"{step:012}").mkdir(parents=True)
    (tmp_path / "rank-0-of-3" / f"{9:012}").mkdir(parents=True)
    (tmp_path / f"{1:012}").mkdir()
    assert list(steps_of(tmp_path, 2)) == [1, 2]
    found = newest_in(tmp_path)
    assert (found.step, found.world) == (2, 2)
