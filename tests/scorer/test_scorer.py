"""A scorer gives the bits of the whole model in memory, whatever memory it has and wherever its rows are."""

import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import hotbed
from hotbed.data.loader.loader import Loader
from hotbed.data.raw_reader import RawReader
from hotbed.errors import BudgetError, FormatError, HotbedError, IdError, RunError, StoreError
from hotbed.host.memory import parse_bytes
from hotbed.scorer import Scorer
from hotbed.scorer.id_map import FileIds
from hotbed.scorer.source import open_source
from hotbed.train.model_folder import load_learner
from hotbed.train.run import run
from hotbed.types import Batch
from tests.scorer.conftest import KINDS, start


def batches(dataset, size=64):
    return list(Loader(dataset, "test", batch_size=size).epoch(0))


def expected(folder, dataset):
    learner = load_learner(folder / "model", "cpu")
    return [learner.score(batch) for batch in batches(dataset)]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("place", "mapped"), [("", False), ("checkpoints", False), ("", True), ("checkpoints", True)])
def test_bits_are_those_of_the_model_in_memory(trained, dataset, kind, place, mapped):
    folder = trained(kind)
    with hotbed.load(folder / place, memory="64KB", mapped=mapped) as scorer:
        for batch, logits in zip(batches(dataset), expected(folder, dataset), strict=True):
            assert torch.equal(scorer.logits(batch).logits, logits)
        assert scorer.num_bytes <= 64_000


@pytest.mark.parametrize("kind", ["plain", "dynamic"])
def test_a_cache_that_is_far_too_small_evicts_and_stays_exact(trained, dataset, kind):
    folder, memory = trained(kind), 2_500 if kind == "plain" else 6_000
    with hotbed.load(folder, memory=memory) as scorer:
        for _ in range(4):
            for batch, logits in zip(batches(dataset), expected(folder, dataset), strict=True):
                assert torch.equal(scorer.logits(batch).logits, logits)
        counts = scorer.counts()
        assert scorer.num_bytes <= memory
    assert counts.files > 109  # every row was read more than once
    assert counts.cache > 0


def test_ids_that_are_in_a_file_are_not_in_memory_too(trained):
    with hotbed.load(trained("dynamic"), memory="20KB") as scorer:
        assert {type(one) for one in scorer.live.id_maps.values()} == {FileIds}
        assert [one.ids for one in scorer.source.tables.values()] == [None] * 4


def test_it_says_what_it_is(trained):
    run = trained("dynamic")
    with hotbed.load(run) as scorer:
        shown = repr(scorer)
        assert shown == f"{scorer!s}"
    assert f"from {run / 'model'} at step " in shown
    assert f"version {scorer.version}, 4 tables (rows: user dynamic, tags 9, ad 20, site dynamic)" in shown
    (checkpoint,) = list((run / "checkpoints").iterdir())[-1:]
    with hotbed.load(checkpoint) as scorer:
        assert f"at step {int(checkpoint.name):,}, version step-{int(checkpoint.name)}-" in repr(scorer)


def opens(place, memory, scratch, **given):
    """Whether this memory is enough; what it takes is never more."""
    try:
        with Scorer(open_source(place), memory, "cpu", scratch, **given) as scorer:
            assert scorer.num_bytes * given.get("processes", 1) <= parse_bytes(memory, "memory")
    except BudgetError:
        return False
    return True


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("place", ["", "checkpoints"])
@pytest.mark.parametrize("given", [{}, {"updated": True}, {"updated": True, "processes": 7}])
def test_too_little_memory_names_what_is_enough(trained, tmp_path, kind, place, given):
    """In one step, and not much more than the least that is."""
    folder = trained(kind) / place
    with pytest.raises(BudgetError) as caught:
        Scorer(open_source(folder), 1, "cpu", tmp_path, **given)
    named = re.search("Give memory='(.*)' \\(--memory (.*)\\) or more", str(caught.value))
    assert named[1] == named[2]
    enough = parse_bytes(named[1], "memory")
    assert all(opens(folder, memory, tmp_path, **given) for memory in (named[1], 2 * enough, 8 * enough))
    assert not opens(folder, int(enough / 1.11) - 8, tmp_path, **given)


def test_incremental_chain_of_a_run_that_was_stopped(dataset, tmp_path):
    """Every checkpoint on the way, also one without a model folder beside it."""
    folder = tmp_path / "run"
    built = start(folder, dataset, "train.max_steps=9")  # checkpoints after 5 and 9: the second adds to the first
    run(built.training, built.subject)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copytree(folder / "checkpoints", alone / "checkpoints")
    with hotbed.load(alone, memory="64KB") as scorer:  # meaning of the columns: from the dataset
        for batch, logits in zip(batches(dataset), expected(folder, dataset), strict=True):
            assert torch.equal(scorer.logits(batch).logits, logits)
    oldest, *_, newest = sorted((alone / "checkpoints").iterdir())
    shutil.rmtree(oldest)
    with pytest.raises(RunError, match="which is not there"):
        hotbed.load(newest)


def test_raw_values_in_every_form(from_raw, tmp_path):
    """As `hotbed predict` reads them: null is missing, and what was never seen is unknown."""
    rows = [
        {"price": 1.5, "age": None, "user": "u7", "tags": ["a", "b", "b"], "ad": 4},
        {"price": -2.0, "age": 3, "user": "no such user", "tags": [], "ad": 0},
        {"price": None, "age": 0, "user": None, "tags": ["c"], "ad": 2**40},
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    with hotbed.load(from_raw) as scorer:
        scores = scorer.score(columns)
        assert scores.dtype == np.float64
        assert len(set(scores)) == 3
        for form in (
            rows,
            pa.table(columns),
            pa.RecordBatch.from_pydict(columns),
            {**columns, "click": [0, 1, 0]},
        ):
            np.testing.assert_array_equal(scorer.score(form), scores)
        pq.write_table(pa.table(columns), tmp_path / "raw.parquet")
        learner = load_learner(from_raw / "model", "cpu")
        (batch,) = RawReader(from_raw / "model", [tmp_path / "raw.parquet"])
        np.testing.assert_array_equal(torch.sigmoid(learner.score(batch).double()).numpy(), scores)
        assert scorer.score({name: [] for name in columns}).shape == (0,)
        assert scorer.score([]).shape == (0,)


def test_a_bag_of_nulls_is_the_same_whatever_is_next_to_it(from_raw):
    """A column of nothing else has no type of values: they were left out, and a missing value next to others was not."""
    one = {"price": [1.5], "age": [1], "user": ["u7"], "tags": [[None, None]], "ad": [4]}
    with hotbed.load(from_raw) as scorer:
        alone = scorer.live.encoder.batch(one)
        two = {name: values * 2 for name, values in one.items()} | {"tags": [[None, None], ["a"]]}
        both = scorer.live.encoder.batch(two)
    assert alone.bags["tags"].offsets.tolist() == [0, 2]
    assert torch.equal(both.bags["tags"].values[:2], alone.bags["tags"].values)


def test_a_data_frame_is_columns(from_raw):
    pandas = pytest.importorskip("pandas")
    columns = {"price": [1.5, None], "age": [1, 2], "user": ["u7", None], "tags": [["a"], []], "ad": [4, 5]}
    with hotbed.load(from_raw) as scorer:
        np.testing.assert_array_equal(scorer.score(pandas.DataFrame(columns)), scorer.score(columns))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user": None}, "no column user"),
        ({"user": ["1"]}, "different lengths"),
        ({"user": "12"}, "one value for each sample"),
        ({"user": ["1", 2]}, "user holds values of different kinds"),
        ({"price": ["x", "1"]}, "row 0 cannot be scored: price is not a number"),
        ({"ad": [1.5, 2]}, "ad is not a whole number"),
        ({"ad": [[1], [2]]}, "ad holds lists"),
        ({"tags": [1, 2]}, "tags holds single values"),
        ({"price": [1e300, 0]}, "price is infinite or beyond"),
    ],
)
def test_wrong_columns_are_reported(from_raw, change, message):
    good = {"price": [1.0, 2.0], "age": [1, 2], "user": ["7", "8"], "tags": [["a"], ["b"]], "ad": [1, 2]}
    given = {name: value for name, value in {**good, **change}.items() if value is not None}
    with hotbed.load(from_raw) as scorer, pytest.raises(FormatError, match=message):
        scorer.score(given)


def test_an_id_outside_its_table_is_reported(trained, dataset):
    batch = batches(dataset)[0]
    bad = Batch(batch.labels, batch.dense, batch.ids + 100, batch.bags)
    with hotbed.load(trained("plain")) as scorer, pytest.raises(IdError, match="outside table 'user'"):
        scorer.logits(bad)
    with hotbed.load(trained("plain")) as scorer, pytest.raises(FormatError, match="must be a mapping"):
        scorer.score(7)


def test_what_is_no_model_is_reported(trained, tmp_path):
    with pytest.raises(RunError, match="there is no"):
        hotbed.load(tmp_path / "nothing")
    with pytest.raises(RunError, match="holds no checkpoint"):
        hotbed.load(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(trained("plain"), copy)
    file = copy / "model" / "tables.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match="does not match its checksum"):
        hotbed.load(copy)


def test_a_file_that_is_cut_while_it_is_read(trained, dataset, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained("plain"), copy)
    with hotbed.load(copy) as scorer:
        (copy / "model" / "tables.safetensors").write_bytes(b"")
        with pytest.raises(StoreError, match="ends before"):
            scorer.logits(batches(dataset)[0])


def test_checkpoints_of_other_loops_are_refused(tmp_path):
    tables = hotbed.EmbeddingTables({"user": hotbed.Table(rows=10, dim=4)})
    hotbed.checkpoint.save(tmp_path / "checkpoints", tables)
    with pytest.raises(HotbedError, match="does not say which model"):
        hotbed.load(tmp_path)
