"""A model of several labels through the commands: every label it learned is scored, measured and exported."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import hotbed
from hotbed.cli import main
from hotbed.scorer.live import ScoredBatch
from tests.export.test_triton import served_by_triton

ROWS = 1500
FAST = ("train.device=cpu", "data.batch_size=64", "model.dim=4", "train.epochs=4", "dense.lr=0.01", "tables.lr=0.05")
PREPARE = ("--label", "click", "--task", "like", "--task", "watched:regression", "--splits", "train=0.7,test=0.3")
OWN = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self, schema, *, together: bool = True):
        super().__init__()
        self.tasks, self.together = schema.tasks, together
        self.heads = nn.ModuleList(nn.Linear(len(schema.features) * schema.dim, 1) for _ in schema.tasks)

    def forward(self, inputs):
        x = torch.cat(list(inputs.vectors.values()), dim=1)
        if not self.together:
            return self.heads[0](x)
        return {name: head(x).squeeze(1) for name, head in zip(self.tasks, self.heads)}
"""


@pytest.fixture
def hotbed_command(capsys):
    def call(*arguments: object) -> str:
        capsys.readouterr()  # of training
        with pytest.raises(SystemExit) as caught:
            main([str(one) for one in arguments])
        captured = capsys.readouterr()
        assert not caught.value.code, captured.err
        return captured.out

    return call


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A log with a binary and a numeric further label that depend on the user, and its dataset."""
    folder, draws = tmp_path_factory.mktemp("tasks"), np.random.default_rng(0)
    user, item = draws.integers(0, 20, ROWS), draws.integers(0, 20, ROWS)
    taste = np.sin(user * 1.7) + np.sin(item * 2.3)
    rows = zip((taste + draws.normal(0, 1, ROWS) > 0) * 1, user, item, (taste > 0.5) * 1, taste + 3)
    lines = [f"{click},u{u},i{i},{like},{watched:.3f}" for click, u, i, like, watched in rows]
    (folder / "log.csv").write_text("\n".join(["click,user,item,like,watched", *lines]) + "\n")
    with pytest.raises(SystemExit) as caught:
        main(["prepare", str(folder / "log.csv"), "--out", str(folder / "data"), *PREPARE])
    assert not caught.value.code
    (folder / "two.py").write_text(OWN)
    return folder


@pytest.fixture(scope="module")
def runs(data):
    """runs("mmoe") -> its folder, trained once."""
    done = {}

    def folder(model, *sets):
        key = (model, *sets)
        if key not in done:
            out = data / f"run{len(done)}"
            arguments = ["train", "--data", str(data / "data"), "--model", model, "--out", str(out)]
            arguments += [part for one in (*FAST, *sets) for part in ("--set", one)]
            with pytest.raises(SystemExit) as caught:
                main(arguments)
            assert not caught.value.code
            done[key] = out
        return done[key]

    return folder


def models(data):
    return {"mmoe": ("mmoe",), "own": (f"{data}/two.py:Two",)}


@pytest.mark.parametrize("model", ["mmoe", "own"])
def test_every_way_of_scoring_gives_all_labels(runs, data, hotbed_command, model, tmp_path):
    run = runs(*models(data)[model])
    hotbed_command("predict", run, data / "data", "--out", tmp_path / "split.parquet", "--device", "cpu")
    split = pq.read_table(tmp_path / "split.parquet")
    names = ["label", "score", "label_like", "score_like", "label_watched", "score_watched"]
    assert split.column_names == ["row", *names]
    assert np.corrcoef(split["label_watched"], split["score_watched"])[0, 1] > 0.8  # planted
    assert float(np.max(split["score_watched"])) > 1.5
    assert float(np.min(split["score_like"])) >= 0
    assert float(np.max(split["score_like"])) <= 1
    raw = {}
    for name, extra in (("whole", ()), ("memory", ("--memory", "10MB"))):
        hotbed_command("predict", run, data / "log.csv", "--out", tmp_path / f"{name}.csv", *extra, "--device", "cpu")
        raw[name] = pyarrow.csv.read_csv(tmp_path / f"{name}.csv")
        assert raw[name].column_names == ["file", "line", *names]
    log = pyarrow.csv.read_csv(data / "log.csv")
    np.testing.assert_allclose(raw["whole"]["label_watched"], log["watched"], rtol=1e-6)
    np.testing.assert_array_equal(raw["whole"]["label_like"], log["like"])
    with hotbed.load(run) as scorer:
        found = scorer.score_tasks(log)
        np.testing.assert_array_equal(found["click"], scorer.score(log))
        assert list(scorer.score_tasks(log.slice(0, 0))) == ["click", "like", "watched"]
        assert len(scorer.score(log.slice(0, 0))) == 0
    for name, column in (("click", "score"), ("like", "score_like"), ("watched", "score_watched")):
        np.testing.assert_allclose(found[name], raw["memory"][column], rtol=1e-6)
        np.testing.assert_allclose(found[name], raw["whole"][column], rtol=0, atol=1e-5)


def test_a_model_of_one_label_scores_that_one(runs, data, hotbed_command, tmp_path):
    for run in (runs("dnn"), runs(f"{data}/two.py:Two", "model.options.together=false")):
        out = tmp_path / f"{run.name}.parquet"
        hotbed_command("predict", run, data / "data", "--out", out, "--device", "cpu")
        assert pq.read_table(out).column_names == ["row", "label", "score"]
        with hotbed.load(run) as scorer:
            assert list(scorer.score_tasks({"user": ["u1"], "item": ["i1"]})) == ["click"]


def test_raw_files_are_measured_by_every_label_they_have(runs, data, hotbed_command, tmp_path):
    run = runs("mmoe")
    found = json.loads(hotbed_command("evaluate", run, data / "log.csv", "--json", "--device", "cpu"))
    assert found["more"]["tasks"]["like"]["auc"] > 0.8
    assert found["more"]["tasks"]["watched"]["r2"] > 0.5
    assert "further tasks" in hotbed_command("evaluate", run, data / "log.csv", "--device", "cpu")
    header, *lines = (data / "log.csv").read_text().splitlines()
    some = [",".join([*line.split(",")[:3], "" if n % 2 else line.split(",")[3]]) for n, line in enumerate(lines)]
    (tmp_path / "some.csv").write_text("\n".join([header.removesuffix(",watched"), *some]) + "\n")
    part = json.loads(hotbed_command("evaluate", run, tmp_path / "some.csv", "--json", "--device", "cpu"))
    assert part["metrics"] == found["metrics"]
    assert part["more"]["tasks"]["like"]["samples"] == ROWS // 2
    assert part["more"]["tasks"]["watched"]["samples"] == 0
    checkpoint = runs("mmoe", "train.checkpoint_every=20") / "checkpoints"
    measured = json.loads(hotbed_command("evaluate", checkpoint, "--json", "--device", "cpu"))
    assert measured["more"]["tasks"]["like"]["samples"] == measured["metrics"]["samples"]


@pytest.mark.parametrize("model", ["mmoe", "own"])
def test_an_export_scores_all_labels(runs, data, hotbed_command, model, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run = runs(*models(data)[model])
    hotbed_command("export", run, "--out", tmp_path / "out")
    spec = importlib.util.spec_from_file_location("exported_score", tmp_path / "out/score.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    export = module.Export(tmp_path / "out")
    rows = pyarrow.csv.read_csv(data / "log.csv").slice(0, 50).to_pylist()
    ours, scorer = export.score_tasks(*export.inputs_of(rows)), hotbed.load(tmp_path / "out")
    with scorer, hotbed.load(run) as trained:
        for name, expected in trained.score_tasks(rows).items():
            np.testing.assert_allclose(ours[name], expected, rtol=0, atol=1e-5)
            np.testing.assert_allclose(scorer.score_tasks(rows)[name], expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(ours["click"], export.score_rows(rows))
    assert "`tasks` [batch, 2] with the scores of like, watched" in (tmp_path / "out/README.md").read_text()


def test_an_export_of_one_label_has_no_further_outputs(runs, data, hotbed_command, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    hotbed_command("export", runs("dnn"), "--out", tmp_path / "out")
    session = onnxruntime.InferenceSession(tmp_path / "out/model.onnx", providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_outputs()] == ["logit", "probability"]
    assert json.loads((tmp_path / "out/export.json").read_text())["onnx"]["tasks"] == []
    assert "`tasks`" not in (tmp_path / "out/README.md").read_text()


def test_the_logits_of_a_scored_batch_are_those_of_the_label():
    outputs = torch.arange(6.0).view(3, 2)
    assert ScoredBatch(outputs, "v").logits.tolist() == [0, 2, 4]
    assert ScoredBatch(outputs[:, 1], "v").logits.tolist() == [1, 3, 5]


def test_triton_serves_every_label(hotbed_command, data, runs, tmp_path, monkeypatch):
    folder = tmp_path / "clicks"
    hotbed_command("export", runs("mmoe"), "--no-onnx", "--triton", "--out", folder)
    text = (folder / "config.pbtxt").read_text()
    names = ["scores", "scores_like", "scores_watched"]
    assert [name in text.partition("output [")[2] for name in (f'"{one}"' for one in names)] == [True] * 3
    table = pyarrow.csv.read_csv(data / "log.csv").slice(0, 50)
    columns = {
        name: np.array([str(one).encode() for one in table[name].to_pylist()], object) for name in ("user", "item")
    }
    with served_by_triton(folder, monkeypatch) as served, hotbed.load(folder) as scorer:
        (answer,) = served(columns)
        expected = scorer.score_tasks(table.select(["user", "item"]))
    assert list(answer.outputs) == names
    for found, wanted in zip(answer.outputs.values(), expected.values()):
        np.testing.assert_array_equal(found, wanted)
