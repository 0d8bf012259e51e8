"""Runs whose features share a table: one row for an item and for the same item in a history."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hotbed
from hotbed.checkpoint.chain import find
from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.data.raw_reader import RawReader
from hotbed.export.write import ExportOptions, export
from hotbed.forecast.explain.explain import explain, top_rows
from hotbed.forecast.trace import from_dataset
from hotbed.models import block_of
from hotbed.run.run_file import compose
from hotbed.tables.sizing.fit import rows_of_batch
from hotbed.telemetry.observer import Progress
from hotbed.train.build import build, sketch
from hotbed.train.model_folder import load_learner
from hotbed.train.row_watch import FILE, RowWatch, WatchedRow, read_lines
from hotbed.train.run import run
from hotbed.train.warm_start import start_from
from hotbed.types import Batch
from tests.data.raw_files import write
from tests.train.small import lines, model_bytes

SETS = ("data.batch_size=32", "model.dim=8", "train.device=cpu", "train.log_every=5")
DIN = ("model.name=din", "model.options.target=item")
ITEMS = 40


def write_log(path, num_rows, num_items=ITEMS):
    """A click where the item is in the history; a friend's last item and a city are between and after them."""
    draws = np.random.default_rng(0)
    rows = []
    for _ in range(num_rows):
        history = draws.integers(0, num_items, draws.integers(1, 7))
        item = draws.choice(history) if draws.random() < 0.5 else draws.integers(0, num_items)
        shown = "|".join(f"i{one}" for one in history)
        rows.append(f"{int(item in history)},{shown},c{draws.integers(3)},i{item},i{draws.integers(num_items)}")
    return write(path, "label,history,city,item,friend", *rows)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_log(tmp_path_factory.mktemp("log") / "log.csv", 1200)


def prepared(log, out, share=("history", "friend"), **options):
    names = dict.fromkeys(share, "item")
    split = "train=0.8,test=0.2"
    return hotbed.prepare(log, out, sequence=["history:|:6"], share=names, split=split, **options).path


@pytest.fixture(scope="module")
def data(log, tmp_path_factory):
    return Dataset.open(prepared(log, tmp_path_factory.mktemp("data") / "shared"))


def start(folder, data, *sets):
    folder.mkdir(parents=True, exist_ok=True)
    config, problems = compose(None, {"data.path": str(data.path)}, [*SETS, *sets])
    assert problems == []
    return build(config, data, folder)


def trained(folder, data, model, *sets):
    """As `hotbed train` does, whose checkpoints say what was trained."""
    settings = {
        name: True if value == "true" else value for name, value in (one.split("=", 1) for one in (*SETS, *sets))
    }
    hotbed.fit(model, str(data.path), out=folder, settings=settings, quiet=True)


@pytest.mark.parametrize("model", [DIN, ("model.name=dnn",), ("model.name=deepfm",)], ids=["din", "dnn", "deepfm"])
def test_a_cache_is_invisible(data, tmp_path, model):
    for name, sets in (
        ("whole", ()),
        ("cached", ("tables.cache=0.95", "tables.policy=lfu")),
        ("warm", ("tables.cache=0.95", "tables.policy=static")),
    ):
        assert run(*start(tmp_path / name, data, *model, *sets)).summary["finished"]
        assert lines(tmp_path / name) == lines(tmp_path / "whole")
        assert model_bytes(tmp_path / name) == model_bytes(tmp_path / "whole")
    weights = load_file(tmp_path / "whole" / "model" / "tables.safetensors")
    assert sorted(weights) == ["city.weight", "item.weight"]
    assert weights["item.weight"].shape[0] == ITEMS + 1


def test_dynamic_ids_train_the_rows_of_a_vocabulary(data, tmp_path):
    """One feature of a table makes it dynamic for all that share it."""
    run(*start(tmp_path / "preset", data, *DIN))
    run(*start(tmp_path / "dynamic", data, *DIN, "tables.dynamic=[history]"))
    preset, dynamic = (load_file(tmp_path / name / "model" / "tables.safetensors") for name in ("preset", "dynamic"))
    assert torch.equal(preset["item.weight"][dynamic["item.id"]], dynamic["item.weight"])


KINDS = {
    "vocabulary": ("vocabulary", ()),
    "dynamic vocabulary": ("vocabulary", ("tables.dynamic=true", "tables.admit=after 2")),
    "hash": ("hash", ()),
    "raw": ("raw", ("tables.dynamic=true",)),
    "raw, shared row": ("raw", ("tables.dynamic=true", "tables.admit=after 2")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_reader_of_a_model_gives_the_same_scores(log, tmp_path, kind):
    """The learner, the scorer over the model, a checkpoint and an export, and score.py, also for ids without a row."""
    mode, sets = KINDS[kind]
    rows = {"hash_rows": 30} if mode == "hash" else {}
    data = Dataset.open(prepared(log, tmp_path / "data", ids_mode=mode, **rows))
    trained(tmp_path / "run", data, "din", *DIN[1:], *sets, "train.epochs=1")
    new = write(
        tmp_path / "new.csv", "label,history,city,item,friend", "0,i1|i99|i3,c0,i98,i2", "1,,c1,i5,i97", "0,i98,,,i1"
    )
    raw = {name: list(column) for name, column in zip(("history", "city", "item", "friend"), zip(*_rows_of(new)))}
    (batch,) = RawReader(tmp_path / "run" / "model", [new])
    learner = load_learner(tmp_path / "run" / "model")
    with torch.no_grad():
        expected = torch.sigmoid(learner.score(batch).double()).numpy()
        vectors, _ = block_of(learner.tables(batch.ids, batch.bags), {"history": 6}, batch.bags)
    assert np.ptp(expected) > 0
    export(tmp_path / "run", tmp_path / "export", ExportOptions(onnx=False))
    for place in (tmp_path / "run", tmp_path / "run" / "checkpoints", tmp_path / "export"):
        with hotbed.load(place) as scorer:
            np.testing.assert_allclose(scorer.score(raw), expected, rtol=0, atol=1e-6)
    alone = importlib.util.spec_from_file_location("score", tmp_path / "export" / "score.py")
    module = importlib.util.module_from_spec(alone)
    alone.loader.exec_module(module)
    exported = module.Export(tmp_path / "export")
    ids, _ = exported.inputs_of([dict(zip(raw, row)) for row in zip(*raw.values())])
    np.testing.assert_allclose(exported.vectors(ids), vectors.numpy(), rtol=0, atol=1e-6)


def _rows_of(path):
    return [line.split(",")[1:] for line in path.read_text().splitlines()[1:]]


def test_a_table_is_planned_and_traced_once(data):
    config, _ = compose(None, {"data.path": str(data.path)}, [*SETS, *DIN])
    found = sketch(config, data)
    assert list(found.tables) == ["item", "city"]
    assert found.tables["item"].pooling == {"history": "none", "item": "sum", "friend": "sum"}
    assert found.amounts.rows == ITEMS + 1 + 4
    source = from_dataset(data, batch_size=32)
    assert source.names == ["item", "city"]
    assert source.ends == [ITEMS + 1, ITEMS + 5]
    assert source.trace.keys.max() < ITEMS + 5
    batch = next(Loader(data, "train", batch_size=32).epoch(0))
    needed = rows_of_batch(found.tables, batch)
    every = torch.cat([batch.ids[:, :2].reshape(-1), batch.bags["history"].values])
    assert needed["item"] == every.unique().numel()


def test_rows_are_explained_over_all_features(data, tmp_path):
    trained(tmp_path / "run", data, "dnn", "tables.cache=0.95", "train.epochs=2")
    found = explain(tmp_path / "run", "history", id=1)
    assert found.request.table == "item"
    assert found.uses.lookups == 2 * int(data.counts("history").counts[0])
    (row, *_), _ = top_rows(tmp_path / "run", "friend", 1)
    assert (row.id, row.lookups) == (1, found.uses.lookups)


def test_a_watched_row_has_the_gradients_of_all_features(data, tmp_path):
    pooling = {"history": "mean", "item": "sum"}
    tables = hotbed.EmbeddingTables({"item": hotbed.Table(9, 4, pooling)}, hotbed.optim.SGD(lr=1.0))
    watch = RowWatch(tmp_path, tables, [WatchedRow("item", 7)])
    bag = hotbed.Jagged(torch.tensor([7, 3, 7]), torch.tensor([0, 2, 3]))
    batch = Batch(torch.zeros(2), torch.zeros(2, 0), torch.tensor([[7], [1]]), {"history": bag})
    before = tables.weight("item")[7].clone()
    vectors = tables(batch.ids, batch.bags)
    watch.watch(batch, vectors)
    (vectors * torch.arange(vectors.numel()).view_as(vectors)).sum().backward()
    watch.step(Progress(step=1))
    watch.end()
    (line,) = read_lines(tmp_path / FILE)
    assert line["lookups"] == 3
    assert line["gradient_norm"] == pytest.approx(float((tables.weight("item")[7] - before).norm()), rel=1e-6)


def test_rows_of_a_table_of_one_feature_start_a_shared_one(log, data, tmp_path):
    apart = Dataset.open(prepared(log, tmp_path / "apart", share=()))
    old = start(tmp_path / "old", apart, "model.name=dnn", "train.epochs=1")
    run(*old)
    learner = start(tmp_path / "new", data, "model.name=dnn").training.learner
    start_from([find(tmp_path / "old")], tmp_path / "new", learner, data)
    before, after = old.training.learner.tables.weight("item"), learner.tables.weight("item")
    new = data.counts("item").ids.tolist()
    for row, id_ in enumerate(apart.counts("item").ids.tolist(), 1):
        assert torch.equal(after[1 + new.index(id_)], before[row])


def test_din_finds_the_item_in_the_history_where_they_share_a_table(tmp_path):
    log = write_log(tmp_path / "log.csv", 8000, num_items=400)
    found = {}
    for kind, share in (("apart", ()), ("shared", ("history",))):
        data = Dataset.open(prepared(log, tmp_path / kind, share))
        for model in (DIN, ("model.name=dnn",)):
            folder = tmp_path / f"{kind}-{model[0]}"
            sets = ("tables.lr=0.1", "dense.lr=0.003", "train.epochs=3", "data.batch_size=128")
            run(*start(folder, data, *model, *sets))
            name = model[0].removeprefix("model.name=")
            found[name, kind] = json.loads((folder / "summary.json").read_text())["final"]["test"]["auc"]
    assert found["din", "shared"] > 0.9, found
    assert found["din", "shared"] > max(found["din", "apart"], found["dnn", "apart"], found["dnn", "shared"]) + 0.05, (
        found
    )
