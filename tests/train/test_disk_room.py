"""What a run says it will save is what it saves, and one whose disk cannot hold it does not begin."""

import shutil
from collections import namedtuple

import pytest

from hotbed.data.schema import IdFeature, Schema
from hotbed.errors import RunError
from hotbed.train.disk_room import check_room, saves_of, trained_rows
from hotbed.train.run import run

WIDE = ("model.dim=64", "tables.optimizer=adam", "model.options.hidden=[8]")
Usage = namedtuple("Usage", "total used free")


def bytes_in(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def free(monkeypatch):
    """free(bytes): so much the disk has left."""

    def leave(amount):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, amount))

    return leave


@pytest.mark.parametrize("sets", [(), ("tables.cache=0.9",), ("tables.precision=bf16",)])
def test_it_is_about_what_the_run_writes(start, tmp_path, sets):
    built = start(tmp_path, *WIDE, *sets)
    saves = saves_of(built.training)
    run(built.training, built.subject)
    assert 0.8 * bytes_in(tmp_path / "model") < saves.model <= bytes_in(tmp_path / "model")
    written = bytes_in(tmp_path / "checkpoints")
    assert 0.3 * written < saves.checkpoints <= written  # of three features of four the ids were not counted


def test_a_disk_that_cannot_hold_it_is_reported_before_the_first_step(start, tmp_path, free):
    training = start(tmp_path, *WIDE, "train.epochs=3").training
    saves = saves_of(training)
    assert saves.best == saves.model > 0
    free(saves.total)
    check_room(training)
    free(saves.total - 1)
    with pytest.raises(
        RunError, match=r"no room for .*KiB \(checkpoints .*, best weights .*, model .*\).*free\..*--out"
    ):
        check_room(training)


def test_the_run_that_is_replaced_makes_room(start, tmp_path, free):
    training = start(tmp_path, *WIDE).training
    free(0)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tables.safetensors").write_bytes(b"x" * 2 * saves_of(training).total)
    check_room(training, replaces=True)
    with pytest.raises(RunError, match="no room"):
        check_room(training)


def test_a_second_full_checkpoint_is_written_beside_the_first(start, tmp_path):
    once = saves_of(start(tmp_path / "a", *WIDE).training)
    often = saves_of(start(tmp_path / "b", *WIDE, "train.checkpoint_every=1").training)
    assert often.checkpoints == 2 * once.checkpoints


def test_less_than_an_epoch_is_not_refused_for_rows_it_may_not_train(start, tmp_path):
    whole, part = (start(tmp_path / str(n), *WIDE, f"train.max_steps={n}").training for n in (0, 2))
    assert saves_of(part).checkpoints < saves_of(whole).checkpoints


@pytest.mark.parametrize(
    ("feature", "rows"),
    [
        ({"rows": 100, "distinct": 40}, 40),  # the others come from valid or test
        ({"rows": 100, "distinct": 500}, 100),  # rare ids share row 0
        ({"rows": 100, "distinct_estimate": 60}, 60),
        ({"rows": 100}, 99),  # nothing was counted; row 0 is for ids that train has not got
        ({"rows": 100, "mode": "raw"}, 0),
        ({"rows": 100, "mode": "raw", "distinct": 30}, 30),
        ({"rows": 100, "mode": "raw", "distinct": 300}, 100),
        ({"rows": 0, "mode": "hash"}, 0),
        ({"rows": 1000, "mode": "hash", "distinct": 1000}, 625),  # 1 - 1/e of the rows, less one in a hundred
    ],
)
def test_rows_that_an_epoch_trains(feature, rows):
    schema = Schema("label", (), (IdFeature("a", **feature),), {})
    assert trained_rows(schema) == {"a": rows}


@pytest.mark.parametrize("sets", [("train.epochs=1",), ("train.epochs=3", "train.keep_best=false")])
def test_best_weights_are_counted_where_there_will_be_some(start, tmp_path, sets):
    saves = saves_of(start(tmp_path, *WIDE, *sets).training)
    assert saves.best == 0 < saves.model
    assert saves_of(start(tmp_path / "kept", *WIDE, "train.epochs=3").training).best == saves.model


def test_a_run_that_is_under_way_has_its_checkpoints_and_best_weights(start, tmp_path):
    training = start(tmp_path, *WIDE, "train.epochs=3").training
    training.progress.step = 1
    saves = saves_of(training)
    assert (saves.checkpoints, saves.best) == (0, 0)
    assert saves.total == saves.model > 0
