"""What reaches TensorBoard, read back with TensorBoard's own reader."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from hotbed.telemetry.observer import Observers, Progress
from hotbed.telemetry.trackers import open_writer
from hotbed.train.run import run

TRAIN = {
    "kind": "train",
    "epoch": 1,
    "samples": 400,
    "lr": 0.01,
    "auc": math.nan,
    "samples_per_s": None,
    "seconds": 1.0,
}
EVAL = {"kind": "eval", "epoch": 1, "samples": 400, "split": "valid", "auc": 0.75, "log_loss": 0.5, "seconds": 1.0}


def scalars(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture
def writer(tmp_path):
    pytest.importorskip("tensorboard")
    return open_writer(tmp_path)


def test_each_line_becomes_scalars(writer, tmp_path):
    watching = Observers([writer])
    watching.begin(Progress(), 8)
    watching.step(Progress(step=1))
    for step in (4, 8):
        watching.record({**TRAIN, "step": step, "loss": step / 2})
    watching.record({**EVAL, "step": 8})
    watching.say("a word")
    watching.end()
    found = scalars(tmp_path / "tensorboard")
    assert found.pop("train/lr") == [(4, pytest.approx(0.01)), (8, pytest.approx(0.01))]
    assert found == {"train/loss": [(4, 2.0), (8, 4.0)], "valid/auc": [(8, 0.75)], "valid/log_loss": [(8, 0.5)]}


@pytest.mark.parametrize(
    "sets",
    [(), ("tables.dynamic=[user]", "tables.cache=0.9", "data.batch_size=16")],
    ids=["plain", "cached and dynamic"],
)
def test_a_run_has_the_numbers_of_its_log(writer, start, tmp_path, sets):
    """Counted from the log without the code that names them: every number of a line, and none beside them."""
    built = start(tmp_path, "train.epochs=1", "train.log_every=3", "train.eval_every=6", *sets, observers=[writer])
    run(built.training, built.subject)
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {one["kind"] for one in logged} == {"train", "eval"}
    expected = sorted(np.float32(value) for one in logged for value in _leaves(one))
    found = scalars(tmp_path / "tensorboard")
    assert sorted(np.float32(value) for points in found.values() for _, value in points) == expected
    for split, metric in (("train", "loss"), ("valid", "auc")):
        lines = [one for one in logged if one.get("split", one["kind"]) == split]
        assert found[f"{split}/{metric}"] == [(one["step"], np.float32(one[metric])) for one in lines]
    assert ("cache/hit_rate" in found, "ids/user/seen" in found) == (bool(sets), bool(sets))


def _leaves(tree, position=("epoch", "step", "samples", "seconds")):
    """The numbers of a line but for where it stands."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        elif name not in position and isinstance(value, int | float):
            yield value


def test_what_the_cache_did_becomes_scalars(writer, tmp_path):
    writer.begin(Progress(), 8)
    writer.record(
        {**TRAIN, "step": 4, "loss": 2.0, "cache": {"hit_rate": 0.75, "bytes_in": 512.0, "stall_share": None}}
    )
    writer.record({**TRAIN, "step": 8, "loss": 2.0, "cache": None})
    writer.end()
    found = scalars(tmp_path / "tensorboard")
    assert {name: found[name] for name in found if name.startswith("cache/")} == {
        "cache/hit_rate": [(4, 0.75)],
        "cache/bytes_in": [(4, 512.0)],
    }


def test_tiers_and_ids_become_scalars(writer, tmp_path):
    writer.begin(Progress(), 8)
    ids = {"user": {"seen": 9, "rows": 3}, "ad": {"seen": 2, "rows": 1}}
    writer.record({**TRAIN, "step": 4, "tiers": {"memory_hit_rate": None, "wear": 512}, "ids": ids})
    writer.end()
    found = scalars(tmp_path / "tensorboard")
    assert {name: found[name] for name in found if name.startswith(("tiers/", "ids/"))} == {
        "tiers/wear": [(4, 512.0)],
        "ids/user/seen": [(4, 9.0)],
        "ids/user/rows": [(4, 3.0)],
        "ids/ad/seen": [(4, 2.0)],
        "ids/ad/rows": [(4, 1.0)],
    }


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(writer, tmp_path):
    for start, loss in ((0, 1.0), (4, 2.0)):
        writer.begin(Progress(step=start), 8)
        for step in range(start + 2, 9, 2):
            writer.record({**TRAIN, "step": step, "loss": loss})
        writer.end()
    assert scalars(tmp_path / "tensorboard")["train/loss"] == [(2, 1.0), (4, 1.0), (6, 2.0), (8, 2.0)]


def test_nothing_is_written_before_training_begins(writer, tmp_path):
    writer.record({**TRAIN, "step": 1})
    writer.end()
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboard_there_is_no_writer(monkeypatch, tmp_path):
    monkeypatch.setattr("hotbed.telemetry.trackers.find_spec", lambda name: None)
    assert open_writer(tmp_path) is None


def test_a_broken_tensorboard_does_not_stop_a_run(writer, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.warns(UserWarning, match="TensorBoard cannot be imported"):
        writer.begin(Progress(), 8)
    writer.record({**TRAIN, "step": 1, "loss": 1.0})
    writer.end()
    assert list(tmp_path.iterdir()) == []


def test_asking_for_a_writer_does_not_import_tensorboard(tmp_path):
    code = "import sys; from pathlib import Path; from hotbed.telemetry.trackers import open_writer; "
    code += "open_writer(Path('x')); sys.exit('torch.utils.tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0
