"""Files of click logs: by day, the same for every way of counting, and kept by a job that was killed."""

import os
import signal
import tracemalloc

import numpy as np
import pytest

from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.data.prepare.prepare import prepare
from hotbed.data.synthetic import SHAPES, ClickLog, make_log, number_ids, write_dataset, write_days, write_text
from hotbed.errors import ConfigError, DataError
from tests.fresh import run_python

AVAZU, BAGS, TERABYTE = SHAPES["avazu-like"], SHAPES["criteo-1tb-bags-like"], SHAPES["criteo-1tb-like"]


def files_of(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", SHAPES)
def test_a_larger_log_spans_the_days_of_its_shape(name):
    """More rows are more of the same, not a longer drift; a smaller log is the first days of the usual one."""
    shape = SHAPES[name]
    usual = shape.days * shape.rows_per_day
    assert make_log(shape, 0, usual // 10, None).rows_per_day == shape.rows_per_day
    for num_rows in (usual, 5 * usual, 5 * usual + 1):
        rows_per_day = make_log(shape, 0, num_rows, None).rows_per_day
        assert -(-num_rows // rows_per_day) == shape.days


def test_preparing_avazu_text_gives_the_same_dataset(tmp_path):
    write_dataset(tmp_path / "d", shape=AVAZU, train=20_000, valid=0, test=3_000, days=4)
    log = ClickLog(AVAZU, rows_per_day=5_750)
    for split, start, stop in (("train", 0, 20_000), ("test", 20_000, 23_000)):
        write_text(tmp_path / f"{split}.csv", log, start, stop)
    raw = [(split, tmp_path / f"{split}.csv") for split in ("train", "test")]
    prepare(raw, tmp_path / "p", label="click", ids=["*"], drop=["id"])
    ours, theirs = Dataset.open(tmp_path / "d"), Dataset.open(tmp_path / "p")
    assert [(f.name, f.rows, f.distinct) for f in ours.schema.features] == [
        (f.name, f.rows, f.distinct) for f in theirs.schema.features
    ]
    assert ours.schema.label == theirs.schema.label == "click"
    assert ours.schema.raw_format == theirs.schema.raw_format
    for split in ("train", "test"):
        (left,) = Loader(ours, split, batch_size=20_000).epoch(0)
        (right,) = Loader(theirs, split, batch_size=20_000).epoch(0)
        assert np.array_equal(left.labels, right.labels)
        assert np.array_equal(left.ids, right.ids)
    head, first = (tmp_path / "test.csv").read_text().splitlines()[:2]
    assert head.startswith("id,click,hour,C1,banner_pos,site_id,")
    assert first.startswith("20000,")
    assert first.split(",")[2] == "14102411"  # 20,000 of 5,750 rows a day


def test_a_dataset_with_bags(tmp_path):
    schema = write_dataset(tmp_path / "d", shape=BAGS, train=2_000, valid=0, test=500)
    log, dataset = ClickLog(BAGS), Dataset.open(tmp_path / "d")
    assert [feature.name for feature in schema.features if not feature.multi] == [
        column.name for column in BAGS.ids if column.bag == 1
    ]
    (batch,) = Loader(dataset, "train", batch_size=2_000).epoch(0)
    rows = log.rows(0, 2_000)
    bags = log.bags(20, rows.ids[20])
    assert np.array_equal(batch.bags["C21"].offsets, bags.offsets)
    number_of = {}
    for id_, row in zip(bags.values.tolist(), batch.bags["C21"].values.tolist()):
        assert number_of.setdefault(id_, row) == row
    assert min(number_of.values()) == 1
    assert len(set(number_of.values())) == len(number_of) == dataset.feature("C21").distinct
    assert dataset.counts("C21").counts.sum() == len(bags.values)


def test_counting_by_hash_table_or_by_array_is_the_same(tmp_path, monkeypatch):
    write_dataset(tmp_path / "array", train=3_000, valid=0, test=500)
    monkeypatch.setattr(number_ids, "SPARSE", 0)
    write_dataset(tmp_path / "hash", train=3_000, valid=0, test=500)
    assert files_of(tmp_path / "array") == files_of(tmp_path / "hash")
    assert isinstance(number_ids._rows_for(10, 10**9), number_ids.HashRows)


def test_memory_does_not_follow_the_cardinality(tmp_path):
    write_dataset(tmp_path / "warm", shape=TERABYTE, train=100, valid=0, test=0)
    tracemalloc.start()
    write_dataset(tmp_path / "d", shape=TERABYTE, train=2_000, valid=0, test=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60e6  # an array over the ids alone would take 750 MB


def test_days_have_files(tmp_path):
    schema = write_dataset(tmp_path / "d", shape=AVAZU, train=1_000, valid=100, test=100, days=10)
    assert schema.splits["train"].files == tuple(f"train/day-{day:05d}.arrow" for day in range(9))
    assert schema.splits["train"].file_rows == (*(120,) * 8, 40)
    assert schema.splits["valid"].files == ("valid/day-00008.arrow", "valid/day-00009.arrow")
    assert schema.notes["rows_per_day"] == 120
    (batch,) = Loader(Dataset.open(tmp_path / "d"), "test", batch_size=100).epoch(0)
    assert np.array_equal(batch.labels, ClickLog(AVAZU, rows_per_day=120).rows(1_100, 1_200).labels)
    with pytest.raises(ConfigError, match="10 rows cannot span 11 days"):
        write_dataset(tmp_path / "e", train=10, valid=0, test=0, days=11)


KILLED = """
import os, signal, sys
from hotbed.data.synthetic import SHAPES, make_log, write_dataset, write_days
def stop(done, limit):
    if done >= limit:
        os.kill(os.getpid(), signal.SIGKILL)
shape, what, out, limit = SHAPES["avazu-like"], sys.argv[1], sys.argv[2], int(sys.argv[3])
if what == "dataset":
    write_dataset(out, shape=shape, train=1500, valid=0, test=500, days=20, progress=lambda done, _: stop(done, limit))
else:
    done = 0
    def report(rows):
        global done
        done += rows
        stop(done, limit)
    write_days(out, make_log(shape, 0, 2000, 20), 2000, report=report)
"""


def killed(what, out, limit):
    assert run_python(KILLED, what, out, limit).returncode == -signal.SIGKILL


def test_a_killed_dataset_goes_on(tmp_path):
    """Killed while counting, then after some files: the end is that of the job left alone, and finished files are kept."""
    wanted = {"shape": AVAZU, "train": 1_500, "valid": 0, "test": 500, "days": 20}
    write_dataset(tmp_path / "whole", **wanted)
    out, partial = tmp_path / "d", tmp_path / ".d.partial"
    killed("dataset", out, 1_500)
    assert not list(partial.rglob("day-*.arrow"))
    killed("dataset", out, 2_600)
    finished = {path: path.stat().st_ino for path in partial.rglob("day-*.arrow")}
    assert 5 <= len(finished) < 20
    assert not out.exists()
    inodes = {}
    write_dataset(
        out, **wanted, progress=lambda *_: inodes.update({p: p.stat().st_ino for p in finished if p.exists()})
    )
    assert inodes == finished
    assert files_of(out) == files_of(tmp_path / "whole")
    assert not partial.exists()


def test_a_job_killed_while_it_tidies_up_goes_on(tmp_path):
    wanted = {"shape": AVAZU, "train": 1_500, "valid": 0, "test": 500, "days": 20}
    write_dataset(tmp_path / "whole", **wanted)
    killed("dataset", tmp_path / "d", 3_500)
    partial = tmp_path / ".d.partial"
    (partial / "numbers" / number_ids.FACTS).unlink()
    (partial / "numbers" / "3.npy").unlink()
    next((partial / "made").iterdir()).unlink()
    write_dataset(tmp_path / "d", **wanted)
    assert files_of(tmp_path / "d") == files_of(tmp_path / "whole")


def test_other_settings_begin_anew(tmp_path):
    killed("dataset", tmp_path / "d", 2_600)
    write_dataset(tmp_path / "d", shape=AVAZU, train=1_500, valid=0, test=500, days=20, seed=1)
    write_dataset(tmp_path / "whole", shape=AVAZU, train=1_500, valid=0, test=500, days=20, seed=1)
    assert files_of(tmp_path / "d") == files_of(tmp_path / "whole")


def test_an_interrupted_job_keeps_its_files_and_a_failed_one_does_not(tmp_path):
    def fail(error):
        def report(done, _):
            if done > 2_000:
                raise error

        return report

    wanted = {"shape": AVAZU, "train": 1_500, "valid": 0, "test": 500, "days": 20}
    with pytest.raises(DataError):
        write_dataset(tmp_path / "d", **wanted, progress=fail(OSError(28, "No space left on device")))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt):
        write_dataset(tmp_path / "d", **wanted, progress=fail(KeyboardInterrupt()))
    assert list((tmp_path / ".d.partial").rglob("day-*.arrow"))


def test_killed_text_goes_on_by_day(tmp_path):
    whole = write_days(tmp_path / "whole", ClickLog(AVAZU, rows_per_day=100), 2_000)
    assert [path.name for path in whole][:2] == ["day_00.csv", "day_01.csv"]
    killed("text", tmp_path / "d", 750)
    first = sorted(path.name for path in (tmp_path / "d").glob("day_*"))
    assert first == [f"day_{day:02d}.csv" for day in range(7)]
    before = os.stat(tmp_path / "d" / "day_03.csv").st_ino
    write_days(tmp_path / "d", ClickLog(AVAZU, rows_per_day=100), 2_000)
    assert os.stat(tmp_path / "d" / "day_03.csv").st_ino == before
    assert files_of(tmp_path / "d") == files_of(tmp_path / "whole")
    one = tmp_path / "one.csv"
    write_text(one, ClickLog(AVAZU, rows_per_day=100), 0, 2_000)
    header, *lines = one.read_text().splitlines(keepends=True)
    assert [header + "".join(lines[100 * day : 100 * day + 100]) for day in range(20)] == [p.read_text() for p in whole]


def test_folders_of_other_text(tmp_path):
    log = ClickLog(AVAZU, rows_per_day=100)
    write_days(tmp_path / "d", log, 200)
    with pytest.raises(ConfigError, match=r"the text of another log .seed 0, not 1"):
        write_days(tmp_path / "d", ClickLog(AVAZU, seed=1, rows_per_day=100), 200)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; the text of several days needs a folder"):
        write_days(tmp_path / "file", log, 200)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary").touch()
    with pytest.raises(ConfigError, match="holds other files"):
        write_days(tmp_path / "mine", log, 200)
    (tmp_path / "d" / ".made-of.json").write_text("[")
    with pytest.raises(DataError, match="cannot hold the text"):
        write_days(tmp_path / "d", log, 200)
    with pytest.raises(ConfigError, match="has bags, for which there is no text format"):
        write_text(tmp_path / "bags", ClickLog(BAGS), 0, 10)
    assert os.listdir(tmp_path / "mine") == ["diary"]
