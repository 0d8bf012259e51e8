"""The gradients of watched rows, against what the optimizer did with them."""

from __future__ import annotations

import json

import pytest
import torch

from hotbed.data.dataset import Dataset
from hotbed.errors import ConfigError
from hotbed.optim import row_optimizer
from hotbed.run.run_file import compose
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.spec import Table
from hotbed.telemetry.observer import Progress
from hotbed.train.build import build
from hotbed.train.row_watch import FILE, RowWatch, WatchedRow, parse_rows, read_lines
from hotbed.types import Batch, Jagged
from tests.data.small import make_dataset


def one_step(tables: EmbeddingTables, batch: Batch, watch: RowWatch, step: int = 1) -> None:
    vectors = tables(batch.ids, batch.bags or None)
    watch.watch(batch, vectors)
    weights = torch.arange(vectors.numel(), dtype=torch.float32).view_as(vectors) / vectors.numel()
    (vectors * weights).sum().backward()
    watch.step(Progress(step=step))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("cache", [None, 0.9])
def test_norms_are_those_of_the_updates(tmp_path, pooling, cache):
    tables = EmbeddingTables(
        {"ad": Table(10, 4), "user": Table(5, 4, hashing=True), "tags": Table(20, 4, pooling)},
        row_optimizer("sgd", lr=1.0),
        cache=cache,
    )
    rows = [WatchedRow("ad", 3), WatchedRow("user", 2), WatchedRow("tags", 7), WatchedRow("ad", 9)]
    watch = RowWatch(tmp_path, tables, rows)
    bags = Jagged(torch.tensor([7, 3, 7, 7]), torch.tensor([0, 3, 3, 4]))
    batch = Batch(torch.zeros(3), torch.zeros(3, 0), torch.tensor([[3, 2], [3, 7], [1, 12]]), {"tags": bags})
    probes = {"ad": torch.tensor([3]), "user": torch.tensor([2]), "tags": torch.tensor([7])}
    before = {name: tables.weight(name)[ids].clone() for name, ids in probes.items()}
    one_step(tables, batch, watch)
    watch.end()
    after = {name: tables.weight(name)[ids] for name, ids in probes.items()}
    noted = {(line["table"], line["id"]): line for line in read_lines(tmp_path / FILE)}
    assert set(noted) == {("ad", 3), ("user", 2), ("tags", 7)}  # nobody looked up ad 9
    for (table, _), line in noted.items():
        assert line["gradient_norm"] == pytest.approx(float((after[table] - before[table]).norm()), rel=1e-5)
    assert [noted[key]["lookups"] for key in sorted(noted)] == [2, 3, 3]


def test_a_run_that_goes_back_forgets_what_came_after(tmp_path):
    lines = [{"step": step, "table": "ad", "id": 1, "lookups": 1, "gradient_norm": 0.5} for step in (1, 5, 9)]
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1')
    tables = EmbeddingTables({"ad": Table(10, 4)}, row_optimizer("sgd", lr=1.0))
    RowWatch(tmp_path, tables, [WatchedRow("ad", 1)]).begin(Progress(step=5), 10)
    assert [line["step"] for line in read_lines(tmp_path / FILE)] == [1, 5]


def test_wrong_rows_are_reported_together():
    tables = {"ad": Table(10, 4), "user": Table(5, 4, hashing=True)}
    assert parse_rows("ad=3, user=12", tables) == [WatchedRow("ad", 3), WatchedRow("user", 2)]
    with pytest.raises(ConfigError, match=r"'x' is not TABLE=ID; there is no table 'q'.*rows 0 to 9, not 10"):
        parse_rows("x,q=1,ad=10", tables)


def test_watching_changes_no_bit(tmp_path):
    make_dataset(tmp_path / "data", {"train": [100]})
    sets = ["data.batch_size=16", "model.dim=4", "model.options.hidden=[8]", "train.device=cpu", "tables.cache=0.5"]
    config, problems = compose(None, {"data.path": str(tmp_path / "data")}, sets)
    assert not problems
    found = []
    for name in ("plain", "watched"):
        (tmp_path / name).mkdir()
        training = build(config, Dataset.open(tmp_path / "data"), tmp_path / name).training
        if name == "watched":
            watch = RowWatch(tmp_path / name, training.learner.tables, [WatchedRow("a", 7)])
            object.__setattr__(training.learner, "watch", watch.watch)
            training.observer = watch
        training.train(lambda: False)
        training.close()
        found.append(training.learner.tables.weight("a").clone())
    assert torch.equal(*found)
