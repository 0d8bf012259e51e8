"""Which model of a run is in use: by the steps that it was trained for, never by the times of files."""

import itertools
import json
import os
from types import SimpleNamespace

import pytest

from hotbed.cli import main
from hotbed.errors import RemoteError, StoreError
from hotbed.host import background
from hotbed.serve import watch
from hotbed.serve.board import Board
from hotbed.serve.metrics import ServerMetrics
from hotbed.serve.watch import ModelOnDisk, newest
from tests.train.small import write_dataset


def make_run(folder, steps_of_model, steps_of_checkpoint):
    """A run as the watch sees it: manifests, and the card of the model."""
    model, checkpoint = folder / "model", folder / "checkpoints" / f"{steps_of_checkpoint:012}"
    for one in (model, checkpoint):
        one.mkdir(parents=True)
        (one / "manifest.json").write_text("{}")
    (model / "model.json").write_text(json.dumps({} if steps_of_model is None else {"steps": steps_of_model}))
    return model, checkpoint


@pytest.mark.parametrize(("model", "checkpoint", "used"), [(12, 8, 0), (12, 12, 0), (12, 16, 1)])
@pytest.mark.parametrize("order", list(itertools.permutations([1.0, 2.0])))
def test_more_steps_count_whatever_was_copied_last(tmp_path, model, checkpoint, used, order):
    both = make_run(tmp_path / "run", model, checkpoint)
    for folder, time in zip(both, order):
        os.utime(folder / "manifest.json", (time, time))
    assert newest(tmp_path / "run").place == both[used]


def test_a_model_of_an_earlier_hotbed_goes_by_times(tmp_path):
    both = make_run(tmp_path / "run", None, 16)
    for used in (0, 1):
        os.utime(both[used] / "manifest.json", (used + 1.0, used + 1.0))
        os.utime(both[1 - used] / "manifest.json", (0.5, 0.5))
        assert newest(tmp_path / "run").place == both[used]


def test_there_is_none(tmp_path):
    assert newest(tmp_path) is None


def test_a_run_writes_its_steps_down(tmp_path):
    write_dataset(tmp_path / "data")
    options = ["--model", "lr", "--batch-size", "16", "--no-forecast", "--quiet", "--set", "train.max_steps=3"]
    with pytest.raises(SystemExit) as caught:
        main(["train", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "run"), *options])
    assert not caught.value.code
    assert json.loads((tmp_path / "run" / "model" / "model.json").read_text())["steps"] == 3
    assert newest(tmp_path / "run").place == tmp_path / "run" / "model"


class FullDisk:
    """A scorer whose updates are refused until there is space."""

    version, num_bytes, source = "step-1-00000000", 0, SimpleNamespace(step=1)
    tries, full = 0, True

    def update(self, entries):
        self.tries += 1
        if self.full:
            raise StoreError("No space left on device")
        return "incremental"


def test_a_refused_model_is_tried_again_when_a_client_asks(monkeypatch):
    """The last checkpoint of a run came while the disk was full: no newer one will come."""
    found = ModelOnDisk(None, (1, 1), 2, list, list)
    monkeypatch.setattr(watch, "newest", lambda place: found)
    scorer = FullDisk()
    one = watch.ModelWatch(None, scorer, ServerMetrics(Board(1)), None, 2.0)
    assert [one.look() for _ in range(3)] == ["refused"] * 3
    assert scorer.tries == 1
    assert one.look_everywhere(lambda: False) == "refused"
    scorer.full = False
    assert one.look() == "refused"  # not at every poll: reading a model takes time
    assert one.look_everywhere(lambda: False) == "incremental"
    assert [one.look(), scorer.tries] == ["none", 3]


def test_a_model_is_stale_no_more_when_the_newer_one_or_the_error_has_gone(monkeypatch):
    """A store that was away for a moment, and a checkpoint that was refused and then given up."""
    old, new = ModelOnDisk("old", (1, 1), 1, list, list), ModelOnDisk("new", (2, 2), 2, list, list)
    metrics, answers = ServerMetrics(Board(1)), iter([new, old, RemoteError("the store is away"), old, new, new])

    def newest(place):
        found = next(answers)
        if isinstance(found, RemoteError):
            raise found
        return found

    monkeypatch.setattr(watch, "newest", newest)
    one = watch.ModelWatch(None, FullDisk(), metrics, old, 2.0)
    found = [(one.look(), metrics.own.stale) for _ in range(6)]
    assert found == [("refused", 1), ("none", 0)] * 2 + [("refused", 1)] * 2


def test_loading_rests_while_requests_come_and_goes_at_full_speed_when_none_do(monkeypatch):
    now, rests, metrics = [0.0], [], ServerMetrics(Board(1))
    monkeypatch.setattr(background, "time", SimpleNamespace(thread_time=lambda: now[0]))
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found = ModelOnDisk(None, (1, 1), 2, list, list)
    monkeypatch.setattr(watch, "newest", lambda place: found)

    class Loading(FullDisk):
        def update(self, entries):
            for requests in (0, 0, 1, 0, 0, 0):
                metrics.own.batches += requests
                now[0] += 0.4
                rests.append(0.0)
                background.pause()
            return "full"

    one = watch.ModelWatch(None, Loading(), metrics, None, 2.0)
    monkeypatch.setattr(one, "_stop", SimpleNamespace(wait=rests.append, is_set=lambda: False))
    assert one.look() == "full"
    assert rests == pytest.approx([0, 0, 0, 1.2, 0, 1.2, 0, 1.2, 0])  # for a second after the request, 3 times the work
