"""An export scores as `hotbed predict` does: onnxruntime and the score.py in it, without hotbed."""

import copy
import csv
import importlib.util
import re
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import hotbed
from hotbed.cli import main
from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.errors import RunError
from hotbed.export.onnx_model import ProbabilityModel, compare, write_onnx
from hotbed.export.write import ExportOptions, export
from hotbed.models import MODELS, build_model
from hotbed.train.model_folder import load_learner
from tests.export.conftest import train

HIDDEN = ("model.options.hidden=[8]", "model.options.batch_norm=true", "model.options.dropout=0.2")


@pytest.fixture(scope="module", autouse=True)
def onnxruntime():
    """Not when tests are collected, which every process does for all of them."""
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnxruntime")


def predicted(run, data, scores):
    with pytest.raises(SystemExit) as caught:
        main(["predict", str(run), str(data), "--out", str(scores), "--device", "cpu"])
    assert not caught.value.code
    return pq.read_table(scores)["score"].to_numpy()


def standalone(folder):
    """score.py of the export, as a module of its own."""
    spec = importlib.util.spec_from_file_location("exported_score", folder / "score.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs_of(data):
    """(ids by feature, dense) of the whole test split."""
    dataset = Dataset.open(data)
    (batch,) = list(Loader(dataset, "test", batch_size=1 << 20).epoch(0))
    ids, single = {}, iter(batch.ids.numpy().T)
    for feature in dataset.schema.features:
        bag = batch.bags.get(feature.name)
        ids[feature.name] = next(single) if bag is None else (bag.values.numpy(), bag.offsets.numpy())
    return ids, batch.dense.numpy()


def exported_scores(folder, data):
    return standalone(folder).Export(folder).score(*inputs_of(data))


def assert_close(ours, theirs, atol=1e-5):
    assert np.ptp(theirs) > 0.1, "scores that do not differ prove nothing"
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_scores_as_predict_does(clicks, tmp_path, model):
    """Single ids, bags, a vocabulary, row numbers and hashed ids, dense features."""
    run = train(tmp_path / "run", clicks, model, *(() if model in ("lr", "fm", "dlrm") else HIDDEN))
    export(run, tmp_path / "out")
    assert_close(exported_scores(tmp_path / "out", clicks), predicted(run, clicks, tmp_path / "scores.parquet"))


@pytest.mark.parametrize("rows", ["safetensors", "parquet"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_every_kind_of_rows_keeps_its_bound(deepfm, tmp_path, rows, precision):
    """README.md: fp16 is off by |w| / 2048, int8 by max |w| / 254 of the row."""
    export(deepfm, tmp_path / "out", ExportOptions(onnx=False, rows=rows, precision=precision))
    trained = load_file(deepfm / "model" / "tables.safetensors")
    tables = standalone(tmp_path / "out").Export(tmp_path / "out").tables
    for name, table in tables.items():
        wanted = trained[f"{name}.weight"].numpy()
        off = np.abs(table.look_up(np.arange(len(wanted))) - wanted)
        most = np.abs(wanted).max(axis=1, keepdims=True) / 254 * (1 + 1e-5)
        bound = {"fp32": 0.0, "fp16": np.maximum(np.abs(wanted) / 2048, 3e-8), "int8": most}[precision]
        assert (off <= bound).all()
        assert (off > 0).any() == (precision != "fp32")


def test_a_model_without_its_rows(deepfm, tmp_path):
    done = export(deepfm, tmp_path / "out", ExportOptions(rows="none"))
    assert (tmp_path / "out" / "model.onnx").is_file()
    assert not (tmp_path / "out" / "rows").exists()
    assert "Score without hotbed" not in (tmp_path / "out" / "README.md").read_text()
    assert done.num_rows == {"user": 50, "tags": 9, "ad": 20, "site": 31}
    with pytest.raises(ValueError, match="holds no rows; export again with --row-format"):
        standalone(tmp_path / "out").Export(tmp_path / "out")


def test_dynamic_ids_and_those_without_a_row(dynamic, clicks, tmp_path):
    export(dynamic, tmp_path / "out")
    assert_close(exported_scores(tmp_path / "out", clicks), predicted(dynamic, clicks, tmp_path / "s.parquet"))


@pytest.mark.parametrize(
    ("init", "precision"),
    [("normal(0.5)", "fp32"), ("normal(0.5)", "bf16"), ("uniform(0.5)", "fp16"), ("constant(0.25)", "fp32")],
)
def test_first_values_of_ids_nobody_trained(clicks, tmp_path, init, precision):
    """Without rules for admission, an id that was never seen reads what it would have begun with."""
    sets = (f"tables.init={init}", f"tables.precision={precision}", "tables.dynamic=true", "model.options.hidden=[8]")
    run = train(tmp_path / "run", clicks, "dnn", *sets)
    export(run, tmp_path / "out", ExportOptions(onnx=False))
    tables = load_learner(run / "model", "cpu").tables
    ids = np.array([-1, 0, 7, 2**62 + 11, -(2**63), 2**63 - 1])
    wanted = tables.eval()({name: torch.from_numpy(ids) for name in tables.tables})
    module = standalone(tmp_path / "out").Export(tmp_path / "out")
    ours = module.vectors(dict.fromkeys(tables.tables, ids))
    np.testing.assert_array_equal(ours, wanted.detach().numpy())


def test_the_readme_runs_as_it_stands(deepfm, tmp_path):
    """In a process that cannot see hotbed."""
    export(deepfm, tmp_path / "out")
    code = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    code = "import sys; sys.modules['hotbed'] = sys.modules['torch'] = None\n" + code
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path / "out", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip("[]\n").split()) == 2
    content = (tmp_path / "out" / "model.onnx").read_bytes()
    assert b"hotbed/models" not in content, "names of source files of this machine"


def test_raw_text_scores_as_predict_does(tmp_path):
    """From a CSV file: prepare, train, export, and encode with score.py alone."""
    rng = np.random.default_rng(3)
    lines = ["label,price,user,city,age"]
    for _ in range(600):
        user, city = int(rng.integers(30)), int(rng.integers(9))
        label = int(rng.random() < 1 / (1 + np.exp(2 - 0.15 * user)))
        lines.append(
            f"{label},{rng.normal():.4f},u{user},{'' if city == 8 else f'the city of {city}'},{rng.integers(-3, 90)}"
        )
    raw = tmp_path / "log.csv"
    raw.write_text("\n".join(lines) + "\n")
    with pytest.raises(SystemExit):
        main(["prepare", str(raw), "--out", str(tmp_path / "data"), "--label", "label", "--integers", "both"])
    run = train(tmp_path / "run", tmp_path / "data", "fm")
    export(run, tmp_path / "out")
    new = tmp_path / "new.csv"
    new.write_text("\n".join([*lines[:40], "0,0.5,nobody,the city of 3,7", "1,,u3,,"]) + "\n")
    theirs = predicted(run, new, tmp_path / "scores.parquet")
    module = standalone(tmp_path / "out")
    ours = module.Export(tmp_path / "out")
    cells = [line.split(",") for line in new.read_text().splitlines()[1:]]
    numbers = np.array([[float(cell) if cell else np.nan for cell in (line[1], line[4])] for line in cells])
    raw_ids = {
        "user": [module.text_id(cell[2]) for cell in cells],
        "city": [module.text_id(cell[3]) for cell in cells],
        "age_bucket": [module.bucket_id(number) for number in numbers[:, 1]],
    }
    assert sorted(raw_ids) == sorted(ours.features)
    ids = {name: ours.rows_of(name, values) for name, values in raw_ids.items()}
    assert_close(ours.score(ids, ours.dense_of(numbers)), theirs)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """(run, raw file): quotes, commas, UTF-8, spaces in names, bags, missing values, numbers that are ids."""
    home = tmp_path_factory.mktemp("mixed")
    rng, sites, tags = np.random.default_rng(5), ["café", "東京", 'the "best"', "a, b", ""], ["news", "art", "été"]
    with (home / "log.csv").open("w", newline="", encoding="utf-8") as file:
        log = csv.writer(file)
        log.writerow(["Site Name", "price", "age", "interests", "zip", "unread", "click"])
        for k in range(600):
            site, bag = int(rng.integers(5)), [tag for tag in tags if rng.random() < 0.5]
            price = "" if k % 7 == 0 else "NA" if k % 7 == 1 else f"{rng.normal():.4f}"
            click = int(rng.random() < 0.1 + 0.15 * site + 0.2 * ("art" in bag))
            log.writerow([sites[site], price, k % 90 - 5, "|".join(bag), 10000 + k % 20, f"r{k}", click])
    given = ("--label", "click", "--multi", "interests:|", "--ids", "zip", "--drop", "unread", "--integers", "both")
    with pytest.raises(SystemExit):
        main(["prepare", str(home / "log.csv"), "--out", str(home / "data"), "--min-count", "2", *given])
    return train(home / "run", home / "data", "dnn", "model.options.hidden=[8]"), home / "log.csv"


@pytest.fixture(scope="module")
def exported(mixed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed-export") / "out"
    export(mixed[0], folder)
    return folder


def test_raw_rows_score_as_predict_does(mixed, exported, tmp_path):
    run, raw = mixed
    theirs = predicted(run, raw, tmp_path / "scores.parquet")
    ours = standalone(exported).Export(exported)
    with raw.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert_close(ours.score_rows(rows), theirs)
    typed = [
        {
            "Site Name": row["Site Name"] or None,
            "price": None if row["price"] in ("", "NA") else float(row["price"]),
            "age": int(row["age"]),
            "interests": [one for one in row["interests"].split("|") if one],
            "zip": np.int64(row["zip"]),
        }
        for row in rows
    ]
    np.testing.assert_array_equal(ours.score_rows(typed), ours.score_rows(rows))
    np.testing.assert_allclose(ours.score_rows(typed), hotbed.load(run).score(typed), rtol=0, atol=1e-5)
    new = {**typed[3], "Site Name": "never seen", "zip": None, "interests": None}
    np.testing.assert_allclose(ours.score_rows([new])[0], hotbed.load(run).score([new])[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("text", ["", " ", "NaN", "NA", "n/a", "NULL", "None", "-", "?", r"\N", " N/A "])
def test_numbers_are_missing_where_prepare_reads_them_so(mixed, exported, text):
    ours = standalone(exported).Export(exported)
    row = {"Site Name": "a, b", "price": None, "age": 7, "interests": "art", "zip": 10001}
    spelled = {**row, "price": text}
    np.testing.assert_array_equal(ours.score_rows([spelled]), ours.score_rows([row]))
    np.testing.assert_allclose(ours.score_rows([row]), hotbed.load(mixed[0]).score([spelled]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("price", "cheap", "price is not a number: 'cheap'"),
        ("price", "1_0", "price is not a number"),
        ("price", float("inf"), "price is infinite"),
        ("zip", 1.5, "zip is not a whole number: 1.5"),
        ("zip", ["a"], "where one id is expected"),
        ("interests", 7, "where a list of ids is expected"),
    ],
)
def test_a_raw_value_that_cannot_be_read_is_told(exported, column, value, told):
    ours = standalone(exported).Export(exported)
    row = {"Site Name": "café", "price": 1.0, "age": 3, "interests": "art", "zip": "10001"}
    with pytest.raises(ValueError, match=re.escape(told)):
        ours.inputs_of([{**row, column: value}])
    with pytest.raises(ValueError, match="no row has price, age"):
        ours.inputs_of([{"zip": 1}])


def test_the_readme_scores_raw_rows_without_hotbed(exported):
    text = (exported / "README.md").read_text()
    assert "\n\nTwo rows as in the raw log" in text
    assert "\n\nTwo samples as in the dataset" in text
    assert not re.search(r"(?m)^ \S|\n\n\n", text), "a stray blank or line"
    assert "| an error; a raw value that is not in the vocabulary has row 0 |" in text
    code = text.split("```python\n")[1].split("```")[0]
    assert "score_rows" in code
    code = "import sys; sys.modules['hotbed'] = sys.modules['torch'] = None\n" + code
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=exported, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip("[]\n").split()) == 2


def test_a_model_that_onnxruntime_scores_otherwise_is_refused(tmp_path):
    model = build_model("deepfm", num_features=26, dim=16, num_dense=13, options={}).eval()
    write_onnx(tmp_path / "model.onnx", model)  # pairs of large vectors cancel: rounding alone is no reason
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.linear.bias += 1e-3
    with pytest.raises(RunError, match="onnxruntime disagrees with the model"):
        compare(tmp_path / "model.onnx", ProbabilityModel(changed).eval(), changed)


def test_a_model_without_dense_features_has_one_input(tmp_path, onnxruntime):
    model = build_model("dlrm", num_features=3, dim=4, num_dense=0, options={}).eval()
    write_onnx(tmp_path / "model.onnx", model)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == ["vectors"]
    for size in (1, 5):
        logits, probabilities = session.run(None, {"vectors": np.ones((size, 3, 4), np.float32)})
        assert logits.shape == probabilities.shape == (size,)
        np.testing.assert_allclose(probabilities, 1 / (1 + np.exp(-logits)), rtol=1e-5)
