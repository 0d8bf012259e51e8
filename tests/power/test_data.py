"""Power is lost while a dataset is made: the old one or the new one is there, and the same command ends with the same bytes."""

from contextlib import suppress

import pytest

from hotbed.data.dataset import Dataset
from hotbed.data.prepare.prepare import prepare
from hotbed.data.synthetic import SHAPES, ClickLog, write_dataset
from hotbed.data.workspace import recover
from hotbed.host import atomic
from tests.data.prepare_jobs import digest
from tests.power.record import Recorder
from tests.power.replay import replay

OPTIONS = {"split": "train=0.7,test=0.3", "max_bad": "5%", "format": "csv", "label": "click", "workers": 1}


def write_log(path, rows):
    lines = [f"{number % 3 == 0:d},{number},u{number % 7},a{number * number % 97}" for number in range(rows)]
    lines[rows // 2] = "bad"
    path.write_text("\n".join(["click,price,user,ad", *lines]) + "\n")
    return path


@pytest.fixture
def small(monkeypatch):
    """Several reels, pieces and parts of a few rows."""
    monkeypatch.setattr("hotbed.data.formats.blocks.REEL_BYTES", 1000)
    monkeypatch.setattr("hotbed.data.prepare.parse.PIECE_IDS", 100)
    monkeypatch.setattr("hotbed.data.prepare.write.PART_ROWS", 60)
    monkeypatch.setattr("hotbed.data.prepare.write.GROUP_ROWS", 32)


def interrupt(*_):
    raise KeyboardInterrupt


class Job:
    """What makes a dataset; it is done again in every k-th state."""

    def __init__(self, make, old, new, every):
        self.make, self.old, self.new, self.every = make, old, new, every
        self.num_opened = 0

    def found(self, left):
        name = self.opened(left / "out")
        self.num_opened += 1
        if self.num_opened % self.every == 0:
            self.make(left / "out")
            assert self.opened(left / "out") == "new"
        return name

    def opened(self, out):
        recover(out)
        if not out.exists():
            return "none"
        Dataset.open(out)
        return {str(self.old): "old", str(self.new): "new"}[str(digest(out))]


@pytest.mark.parametrize(("swap", "every"), [("exchange", 6), ("two renames", 200)])
def test_a_dataset_is_prepared_in_the_place_of_another(disk, room, tmp_path, small, monkeypatch, swap, every):
    if swap == "two renames":
        monkeypatch.setattr(atomic, "exchange", lambda *_: False)
    logs = [write_log(tmp_path / "one.csv", 120), write_log(tmp_path / "two.csv", 50)]
    prepare(logs[:1], disk / "out", overwrite=True, **OPTIONS)
    old = digest(disk / "out")
    with Recorder(disk) as recorder:
        prepare(logs, disk / "out", overwrite=True, **OPTIONS)
        recorder.mark("new")
    job = Job(lambda out: prepare(logs, out, overwrite=True, **OPTIONS), old, digest(disk / "out"), every=every)
    replay(
        f"prepare: in the place of another, {swap}",
        recorder,
        room,
        job.found,
        lambda said: {"new"} if said else {"old", "new"},
    )


@pytest.fixture
def calibrated_once(monkeypatch):
    """Scales and bias of a log are the same each time that it is made, and take most of the time of a small one."""
    calibrate, found = ClickLog._calibrate, {}

    def calibrated(self):
        key = repr((self.shape, self._key, self.rows_per_day))
        if key not in found:
            calibrate(self)
            found[key] = self._parts, self._bias
        self._parts, self._bias = found[key]

    monkeypatch.setattr(ClickLog, "_calibrate", calibrated)


@pytest.mark.usefixtures("calibrated_once")
def test_a_synthetic_dataset(disk, room, monkeypatch):
    """It is made once, in a cache; what was left half made is gone on with, what was left of another one is not."""
    monkeypatch.setattr("hotbed.data.synthetic.write.CHANCE_BINS", 64)
    shape = SHAPES["avazu-like"]
    shape = shape._replace(ids=shape.ids[:4], interacting=shape.interacting[:0])

    def make(out):
        if not out.exists():
            write_dataset(out, shape=shape, train=60, valid=20, test=20, threads=1)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr("hotbed.data.synthetic.write._schema", interrupt)
        write_dataset(disk / "out", shape=shape, train=60, valid=20, test=20, seed=1, threads=1)
    assert (disk / ".out.partial" / "settings").is_file()
    with Recorder(disk) as recorder:
        make(disk / "out")
        recorder.mark("new")
    job = Job(make, None, digest(disk / "out"), every=6)
    replay("synthetic dataset", recorder, room, job.found, lambda said: {"new"} if said else {"none", "new"})


def test_work_that_was_left_for_other_settings(disk, room, tmp_path, small, monkeypatch):
    """None of its files is taken for one of the new job."""
    log = write_log(tmp_path / "one.csv", 60)
    monkeypatch.setattr("hotbed.data.prepare.stages._WORTH_KEEPING", 1)
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr("hotbed.data.prepare.prepare.commit", interrupt)
        prepare([log], disk / "out", min_count=3, **OPTIONS)
    assert (disk / ".out.partial" / "job.json").is_file()
    with Recorder(disk) as recorder:
        prepare([log], disk / "out", **OPTIONS)
        recorder.mark("new")
    job = Job(lambda out: prepare([log], out, overwrite=True, **OPTIONS), None, digest(disk / "out"), every=4)
    replay("prepare: over other work", recorder, room, job.found, lambda said: {"new"} if said else {"none", "new"})
