"""Power is lost during `hotbed train`: the run resumes from its last checkpoint and ends with the same bits."""

import json
import shutil

import pytest

from hotbed.checkpoint import saver
from hotbed.checkpoint.layouts import newest_in
from hotbed.checkpoint.read import problems_of
from hotbed.cli import main
from hotbed.run.folder import check_folder, read_json
from hotbed.run.model_card import read_card
from hotbed.train.checkpoint import checkpoint_root
from tests.power.record import Recorder
from tests.power.replay import replay
from tests.train.small import SMALL, model_bytes, write_dataset

STEPS = (3, 6, 8)


def hotbed(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(one) for one in arguments])
    assert not caught.value.code


def step_of(run, known):
    """Where a run can be resumed; all that resuming counts on is there."""
    newest = newest_in(checkpoint_root(run))
    if newest is None:
        return 0
    (folder,) = newest.folders
    content = tuple(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    if content not in known:
        known[content] = problems_of(folder)
    assert known[content] == []
    progress = json.loads((folder / "manifest.json").read_text())["checkpoint"]["document"]["progress"]
    log = (run / "metrics.jsonl").read_bytes()[: progress["log_position"]]
    assert len(log) == progress["log_position"]
    for line in log.splitlines():
        json.loads(line)
    if progress["best"] and progress["best"]["step"] != progress["step"]:
        check_folder(run / "best" / str(progress["best"]["step"]))
    assert read_json(run / "config.json")["train"]["max_steps"] == STEPS[-1]
    assert read_json(run / "data.json")["path"]
    return newest.step


def test_a_run_from_its_first_file_to_its_last(disk, room, tmp_path, monkeypatch):
    data = write_dataset(tmp_path / "data", {"train": 300, "valid": 60, "test": 60})
    settings = (*SMALL, f"train.max_steps={STEPS[-1]}", "train.checkpoint_every=3", "train.keep_checkpoints=1")
    settings += ("data.batch_size=32", "train.eval_every=2", "train.keep_best=true")
    sets = [part for one in settings for part in ("--set", one)]
    run, resumed, known = disk / "runs" / "one", set(), {}
    with Recorder(disk) as recorder:
        written = saver.write_checkpoint

        def write(root, state, *others):
            entry = written(root, state, *others)
            recorder.mark(f"{state.step}")
            return entry

        monkeypatch.setattr(saver, "write_checkpoint", write)
        monkeypatch.setattr(saver.Saver, "busy", False)  # each is waited for, none is left out
        hotbed("train", "--data", data, "--model", "dnn", "--out", run, *sets)
        recorder.mark("model")
    monkeypatch.undo()

    def found(left):
        """The step, and whether there is a model; the first state of each kind goes on to the end."""
        one = left / "runs" / "one"
        step, has_model = step_of(one, known), (one / "model").exists()
        if has_model:
            read_card(one / "model")
            assert model_bytes(one) == model_bytes(run)
        if step and not has_model and step not in resumed:
            resumed.add(step)
            shutil.rmtree(tmp_path / "again", ignore_errors=True)
            shutil.copytree(one, tmp_path / "again")
            hotbed("train", "--resume", tmp_path / "again")
            assert model_bytes(tmp_path / "again") == model_bytes(run)
        return f"{step}{' model' * has_model}"

    def allowed(said):
        if "model" in said:
            return {f"{STEPS[-1]} model"}
        last = int(said[-1]) if said else 0
        return {f"{step}{model}" for step in (0, *STEPS) if step >= last for model in ("", " model")}

    replay("hotbed train, from nothing to the end", recorder, room, found, allowed)
    assert resumed == set(STEPS)
