"""A log with a history goes through every command: a model that reads it vector by vector, and one that pools it."""

from __future__ import annotations

import csv
import importlib.util
import json

import numpy as np
import pytest

import hotbed as package
from hotbed.models import own_code

MODEL = '''
import torch
from torch import nn

class Last(nn.Module):
    """The last item of the history beside the item."""

    def __init__(self, schema):
        super().__init__()
        assert schema.sequences == {"history": 5}
        self.head = nn.Linear(2 * schema.dim + 1, 1)

    def forward(self, inputs):
        history = inputs.sequences["history"]
        places = (history.lengths - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, history.vectors.shape[2])
        last = history.vectors.gather(1, places).squeeze(1)
        share = history.mask.sum(1, keepdim=True) / history.mask.shape[1]
        return self.head(torch.cat([last, inputs.vectors["item"], share], dim=1))
'''
TRAIN = ("--set", "data.batch_size=16", "--set", "model.dim=4", "--set", "train.device=cpu", "--quiet")


@pytest.fixture(autouse=True)
def stranger(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(own_code, "_trusted", [])


@pytest.fixture
def log(tmp_path):
    """A click is likely where the item is in the history."""
    draws = np.random.default_rng(0)
    path = tmp_path / "log.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "item", "history"])
        for _ in range(500):
            history, item = draws.integers(0, 60, draws.integers(0, 9)), draws.integers(0, 60)
            writer.writerow([int(item in history[-5:]), f"i{item}", "|".join(f"i{one}" for one in history)])
    return path


def scores(path):
    with path.open() as file:
        return np.array([float(row["score"]) for row in csv.DictReader(file)])


@pytest.mark.filterwarnings("ignore:`isinstance")  # torch's own, of its exporter
@pytest.mark.parametrize("share", [(), ("--share", "history=item")], ids=["two tables", "one table"])
@pytest.mark.parametrize("model", ["last.py:Last", "din", "dnn"])
def test_every_command_takes_a_history(hotbed, log, tmp_path, model, share):
    (tmp_path / "last.py").write_text(MODEL)
    made = ("--sequence", "history:|:5", *share, "--split", "train=0.7,test=0.3", "--out", "data")
    result = hotbed("prepare", log, *made)
    assert result.code == 0, result.err
    assert "in order, the last 5 of a row" in result.out
    run = tmp_path / "run"
    options = ("--set", "model.options.target=item") if model == "din" else ()
    result = hotbed("train", "--data", "data", "--model", model, *TRAIN, *options, "--cache", "0.95", "--out", run)
    assert result.code == 0, result.err
    tables = json.loads((run / "model" / "model.json").read_text())["tables"]
    pooling = tables["item"]["pooling"]["history"] if share else tables["history"]["pooling"]
    assert pooling == ("mean" if model == "dnn" else "none")
    for command in (
        ("evaluate", run),
        ("predict", run, log, "--out", "scores.csv"),
        ("report", run),
        ("plan", "data", "--model", model, *options, "--batch-size", "128"),
        ("verify", "--data", "data", "--model", model, *TRAIN[:4], *options, "--steps", "2"),
        ("export", run, "--out", "export"),
    ):
        result = hotbed(*command)
        assert result.code == 0, (command, result.out, result.err)
    with log.open() as file:
        rows = [{"item": row["item"], "history": row["history"]} for row in csv.DictReader(file)][:50]
    expected = scores(tmp_path / "scores.csv")[:50]
    with package.load(run) as scorer:  # as `hotbed serve` does
        np.testing.assert_allclose(scorer.score(rows), expected, atol=1e-6)
    found = importlib.util.spec_from_file_location("score", tmp_path / "export" / "score.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    np.testing.assert_allclose(module.Export(tmp_path / "export").score_rows(rows), expected, atol=1e-5)


def test_share_takes_pairs(hotbed, log):
    result = hotbed("prepare", log, "--sequence", "history:|:2", "--share", "history=item", "--out", "data")
    assert result.code == 0, result.err
    assert "those of item" in result.out
    result = hotbed("prepare", log, "--share", "history", "--out", "other")
    assert result.code == 2
    assert "--share 'history' is not COLUMN=OTHER, such as 'history=item'" in result.err


def test_refusals_name_the_way_out(hotbed, log):
    assert hotbed("prepare", log, "--sequence", "history:|:5", "--out", "data").code == 0
    watched = ("--set", "model.options.target=item", "--watch-rows", "item=1", "--out", "run")
    result = hotbed("train", "--data", "data", "--model", "din", *TRAIN, *watched)
    assert result.code == 2
    assert "--watch-rows records gradients of pooled vectors; this model reads history vector by vector" in result.err
    assert hotbed("prepare", log, "--multi", "history:|", "--out", "bags").code == 0
    result = hotbed("train", "--data", "bags", "--model", "din", *TRAIN, "--out", "other")
    assert result.code == 2
    assert "hotbed prepare --sequence" in result.err
    result = hotbed(
        "train", "--data", "data", "--model", "din", *TRAIN, "--set", "model.options.target=user", "--out", "other"
    )
    assert result.code == 2
    assert "model.options.target" in result.err
    assert "item" in result.err
