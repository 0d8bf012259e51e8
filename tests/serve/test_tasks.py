"""A model of several labels behind HTTP: every label it learned, with the bits of the scorer and of `predict`."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import hotbed
from hotbed.cli import main
from tests.cli.test_tasks import FAST, PREPARE
from tests.serve.conftest import serving

ROWS = 300
TASKS = ["like", "watched"]


def call(*arguments: object) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(one) for one in arguments])
    assert not caught.value.code


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A log, its dataset, and runs of a model of all labels and of one of the first."""
    place, draws = tmp_path_factory.mktemp("tasks"), np.random.default_rng(0)
    columns = zip(*(draws.integers(0, high, ROWS) for high in (2, 20, 20, 2)), draws.normal(3, 1, ROWS))
    lines = [f"{click},u{user},i{item},{like},{watched:.3f}" for click, user, item, like, watched in columns]
    (place / "log.csv").write_text("\n".join(["click,user,item,like,watched", *lines]) + "\n")
    call("prepare", place / "log.csv", "--out", place / "data", *PREPARE)
    sets = [part for one in FAST for part in ("--set", one)]
    for model in ("mmoe", "deepfm"):
        call("train", "--data", place / "data", "--model", model, "--out", place / model, *sets)
    return place


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder / "mmoe", "--memory", "1MB") as found:
        yield found


@pytest.fixture(scope="module")
def columns(folder):
    table = pyarrow.csv.read_csv(folder / "log.csv").select(["user", "item"])
    return table.slice(0, 64).to_pydict()


def infer(server, columns, **more):
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [len(values)], "data": values} for name, values in columns.items()
    ]
    status, body, _ = server.ask("POST", "/v2/models/mmoe/infer", json.dumps({"inputs": inputs, **more}).encode())
    return status, json.loads(body)


def test_all_labels_with_the_bits_of_the_scorer_and_of_predict(folder, server, columns):
    status, answer = server.score({"candidates": columns})
    assert status == 200
    assert list(answer) == ["scores", "tasks", "model"]
    with hotbed.load(folder / "mmoe") as scorer:
        expected = scorer.score_tasks(columns)
    assert {"click": answer["scores"], **answer["tasks"]} == {name: one.tolist() for name, one in expected.items()}

    raw = pyarrow.csv.read_csv(folder / "log.csv").slice(0, 64)
    pyarrow.csv.write_csv(raw, folder / "few.csv")
    call("predict", folder / "mmoe", folder / "few.csv", "--out", folder / "few.parquet")
    written = pq.read_table(folder / "few.parquet")
    assert written["score"].to_pylist() == answer["scores"]
    assert {name: written[f"score_{name}"].to_pylist() for name in TASKS} == answer["tasks"]


def test_outputs_of_the_inference_protocol(server, columns):
    scored = server.score({"candidates": columns})[1]
    expected = {"scores": scored["scores"], **{f"scores_{name}": scored["tasks"][name] for name in TASKS}}
    status, answer = infer(server, columns)
    assert status == 200
    assert {one["name"]: one["data"] for one in answer["outputs"]} == expected
    assert all(one["shape"] == [64] and one["datatype"] == "FP64" for one in answer["outputs"])
    status, answer = infer(server, columns, outputs=[{"name": "scores_like"}])
    assert [(one["name"], one["data"]) for one in answer["outputs"]] == [("scores_like", expected["scores_like"])]
    status, answer = infer(server, columns, outputs=[{"name": "scores"}, {"name": "scores_click"}])
    assert (status, answer["where"]) == (422, "outputs[1]")
    assert "there is 'scores', 'scores_like', 'scores_watched'" in answer["error"]
    about = json.loads(server.ask("GET", "/v2/models/mmoe")[1])
    assert about["outputs"] == [{"name": name, "datatype": "FP64", "shape": [-1]} for name in expected]


def test_openapi_names_the_labels(server):
    paths = json.loads(server.ask("GET", "/openapi.json")[1])["paths"]
    answer = paths["/score"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer["required"] == ["scores", "model", "tasks"]
    tasks = answer["properties"]["tasks"]
    assert tasks["required"] == TASKS
    assert tasks["properties"]["like"]["items"]["maximum"] == 1
    assert "maximum" not in tasks["properties"]["watched"]["items"]
    assert "`scores_watched`" in paths["/v2/models/mmoe/infer"]["post"]["description"]
    assert b"tasks, by name" in server.ask("GET", "/")[1]


def test_a_model_of_one_label_answers_as_before(folder, columns):
    """The data has three labels; this model learns the first."""
    with serving(folder / "deepfm", "--memory", "1MB") as server:
        assert list(server.score({"candidates": columns})[1]) == ["scores", "model"]
        about = json.loads(server.ask("GET", "/v2/models/deepfm")[1])
        assert [one["name"] for one in about["outputs"]] == ["scores"]
