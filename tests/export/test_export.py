"""What an export holds, of what, in which order; and what is refused."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

import hotbed.export
from hotbed.data.dataset import Dataset
from hotbed.errors import ExitCode, RunError
from hotbed.export import onnx_model, read_export, rows
from hotbed.export.rows import to_precision
from hotbed.export.write import ExportOptions, export
from hotbed.run.folder import write_folder
from tests.data.small import make_dataset

ROWS = ExportOptions(onnx=False)


def files(folder):
    """Content by name, without what tells where it comes from."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name: content for name, content in found.items() if name.startswith(("rows/", "dense", "counts/", "schema"))
    }


@pytest.mark.parametrize("memory", [None, "1KiB"])
@pytest.mark.parametrize("which", ["deepfm", "dynamic"])
def test_a_checkpoint_is_exported_as_the_model_it_became(request, tmp_path, which, memory):
    """Rows that training never came to are there, too; they may pass through files on their way."""
    run = request.getfixturevalue(which)
    export(run, tmp_path / "model", ROWS)
    done = export(run / "checkpoints", tmp_path / "checkpoint", ROWS._replace(memory=memory))
    assert done.source == {"kind": "checkpoint", "step": 8}
    assert files(tmp_path / "checkpoint") == files(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    early = export(run / "checkpoints" / f"{5:012}", tmp_path / "early", ROWS)
    assert early.source["step"] == 5
    assert files(tmp_path / "early") != files(tmp_path / "model")


def test_a_run_that_has_not_ended_is_exported_by_its_checkpoint(deepfm, clicks, tmp_path):
    run = shutil.copytree(deepfm, tmp_path / "run")
    shutil.rmtree(run / "model")
    with pytest.raises(RunError, match=r"holds no trained model.*run/checkpoints.*serve and export take its newest"):
        export(run, tmp_path / "out", ROWS)
    export(run / "checkpoints", tmp_path / "out", ROWS)
    export(deepfm, tmp_path / "whole", ROWS)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    moved = shutil.copytree(clicks, tmp_path / "moved")
    export(run / "checkpoints", tmp_path / "again", ROWS._replace(data=str(moved)))
    make_dataset(tmp_path / "else", {"train": [20]})
    with pytest.raises(RunError, match="else is not the dataset of the run: it has other ids of user"):
        export(deepfm, tmp_path / "other", ROWS._replace(data=str(tmp_path / "else")))
    pq.write_table(pa.table({"id": np.arange(49), "count": np.arange(49)}), moved / "counts" / "user.parquet")
    with pytest.raises(RunError, match="has changed since"):
        export(run / "checkpoints", tmp_path / "other", ROWS._replace(data=str(moved)))


def test_hot_rows_come_first(deepfm, dynamic, clicks, tmp_path):
    export(deepfm, tmp_path / "out", ROWS)
    tables, dataset = read_export(tmp_path / "out").tables, Dataset.open(clicks)
    assert {name: table.order for name, table in tables.items()} == dict.fromkeys(tables, "frequency")
    assert [name for name, table in tables.items() if table.id_is_position] == ["user"]
    counts = dataset.counts("site")
    seen = np.bincount(counts.ids % 31, weights=counts.counts, minlength=31)
    assert (np.diff(seen[tables["site"].ids()]) <= 0).all()
    assert sorted(tables["site"].ids()) == list(range(31))
    trained = load_file(deepfm / "model" / "tables.safetensors")
    for name, table in tables.items():
        np.testing.assert_array_equal(table.weights(), trained[f"{name}.weight"].numpy()[table.ids()])
    export(dynamic, tmp_path / "dynamic", ROWS)
    users = read_export(tmp_path / "dynamic").tables["user"]
    by_row = np.concatenate([[0], dataset.counts("user").counts])
    assert (np.diff(by_row[users.ids()]) <= 0).all()
    assert users.shared is not None
    assert len(users.shared) == users.dim


def test_without_counts_rows_are_in_the_order_of_ids(deepfm, tmp_path, hotbed):
    run = shutil.copytree(deepfm, tmp_path / "run")
    card = json.loads((run / "model" / "model.json").read_text())
    card["dataset"] = str(tmp_path / "gone")
    (run / "data.json").unlink()  # says where it was

    def fill(new):
        shutil.copytree(deepfm / "model", new, dirs_exist_ok=True)
        (new / "manifest.json").unlink()
        (new / "model.json").write_text(json.dumps(card))

    write_folder(run / "model", fill)
    code, out, err = hotbed("export", run, "--no-onnx")
    assert code == 0
    assert "rows of tags, ad, site are ordered by id" in err
    tables = read_export(run / "export").tables
    assert [table.order for table in tables.values()] == ["frequency", "id", "id", "id"]
    assert all(table.id_is_position for table in tables.values())
    assert "110 rows" in out


def test_a_reader_finds_rows_by_their_offsets(deepfm, tmp_path):
    export(deepfm, tmp_path / "out", ROWS._replace(precision="int8"))
    opened = read_export(tmp_path / "out", every_byte=True)
    assert (opened.precision, opened.row_format, opened.has_onnx) == ("int8", "safetensors", False)
    table = opened.tables["ad"]
    with (tmp_path / "out" / table.file).open("rb") as file:
        file.seek(table.offsets["weight"] + 7 * table.dim)
        row = np.frombuffer(file.read(table.dim), np.int8)
        file.seek(table.offsets["scale"] + 7 * 4)
        scale = np.frombuffer(file.read(4), np.float32)
    np.testing.assert_array_equal(table.values(np.array([7]))[0], row * scale)


def test_many_pieces_are_one_file(deepfm, dynamic, tmp_path, monkeypatch):
    """Tables larger than memory pass through in pieces."""
    for run in (deepfm, dynamic):
        for wanted in (ROWS._replace(precision="int8"), ROWS._replace(rows="parquet")):
            export(run, tmp_path / "whole", wanted._replace(overwrite=True))
            with monkeypatch.context() as patch:
                patch.setattr(rows, "_PIECE", 80)
                export(run, tmp_path / "pieces", wanted._replace(overwrite=True))
            for one in ("user", "ad"):
                name = f"rows/{one}.{wanted.rows}"
                if wanted.rows == "parquet":
                    assert pq.read_table(tmp_path / "pieces" / name).equals(pq.read_table(tmp_path / "whole" / name))
                    assert pq.ParquetFile(tmp_path / "pieces" / name).num_row_groups >= 4
                else:
                    assert (tmp_path / "pieces" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("precision", "value", "message"),
    [
        ("fp16", 7e4, "id 1 holds a number of size 70000, and fp16 ends at 65504"),
        ("fp16", -np.inf, "id 1 holds -inf, which cannot be"),
        ("int8", np.nan, "id 1 holds nan, which cannot be"),
        ("fp32", np.inf, "id 1 holds inf, which cannot be"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(precision, value, message):
    values = np.zeros((3, 2), np.float32)
    values[2, 1] = value
    with pytest.raises(RunError, match=message):
        to_precision(values, precision, "user", np.array([5, 3, 1]))


def test_rows_at_the_edge_of_int8():
    tiny = np.finfo(np.float32).tiny
    values = np.array([[0, 0], [-1, 0.5], [3e38, 1], [tiny, -tiny], [127 * tiny, tiny], [65519, 1]], np.float32)
    weight, scale = to_precision(values, "int8", "user", np.arange(6))
    assert weight.tolist()[:2] == [[0, 0], [-127, 64]]
    off = np.abs(weight * scale[:, None].astype(np.float64) - values)
    assert (off <= np.maximum(np.abs(values).max(axis=1, keepdims=True) / 254 * 1.00001, 1.5e-36)).all()
    half, _ = to_precision(values[[5]], "fp16", "user", np.arange(1))
    assert half[0, 0] == 65504


def test_an_export_replaces_an_export_and_nothing_else(deepfm, tmp_path):
    out = tmp_path / "out"
    export(deepfm, out, ROWS)
    before = files(out)
    with pytest.raises(RunError, match="--overwrite replaces it"):
        export(deepfm, out, ROWS)
    bad = shutil.copytree(deepfm, tmp_path / "bad")
    tensors = load_file(bad / "model" / "tables.safetensors")
    tensors["ad.weight"][3, 1] = 1e5

    def fill(new):
        shutil.copytree(deepfm / "model", new, dirs_exist_ok=True)
        (new / "manifest.json").unlink()
        save_file(tensors, new / "tables.safetensors")

    write_folder(bad / "model", fill)
    with pytest.raises(RunError, match="'ad': the row of id 3 holds"):
        export(bad, out, ROWS._replace(precision="fp16", overwrite=True))
    assert files(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match="is not an export"):
        export(deepfm, tmp_path / "mine", ROWS._replace(overwrite=True))
    with pytest.raises(RunError, match="is an export already"):
        export(out, tmp_path / "again", ROWS)


def test_damage_is_named(deepfm, tmp_path):
    out = tmp_path / "out"
    export(deepfm, out, ROWS)
    path = out / "rows" / "site.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    read_export(out)
    with pytest.raises(RunError, match=r"rows/site\.safetensors does not match its checksum"):
        read_export(out, every_byte=True)
    path.write_bytes(content[:-1])
    with pytest.raises(RunError, match=r"rows/site\.safetensors has \d+ bytes"):
        read_export(out)
    with pytest.raises(RunError, match="holds no export"):
        read_export(tmp_path)


def test_names_of_before_are_found_with_a_warning():
    for old, new in (("Wanted", "ExportOptions"), ("Exported", "ExportReport")):
        with pytest.warns(DeprecationWarning, match=f"{old} is called {new} now"):
            assert getattr(hotbed.export, old) is getattr(hotbed.export, new)


def test_what_makes_no_sense_is_refused_at_once(deepfm, tmp_path, hotbed, monkeypatch):
    for arguments, message in (
        (("--row-format", "csv"), "--row-format must be one of safetensors, parquet, none, not 'csv'"),
        (("--precision", "fp8"), "--precision must be one of fp32, fp16, int8, not 'fp8'"),
        (("--row-format", "none", "--no-onnx"), "leaves nothing to export"),
        (("--memory", "5x", "--no-onnx"), "--memory: must be an amount of memory"),
        (("--memory", "1GiB", "--no-onnx"), "--memory 1GiB is for the rows of a checkpoint"),
        (("--memory", "1GiB", "--no-onnx", "--dry-run"), "--memory 1GiB is for the rows of a checkpoint"),
        (("--row-format", "none", "--precision", "int8"), "--precision int8 is of the rows"),
    ):
        code, _, err = hotbed("export", deepfm, "--out", tmp_path / "out", *arguments)
        assert code == 2
        assert message in err
    monkeypatch.setattr(onnx_model, "find_spec", lambda name: None if name == "onnxscript" else True)
    code, _, err = hotbed("export", deepfm, "--out", tmp_path / "out")
    assert code == 2
    assert "needs onnxscript, which is not installed. pip install " in err
    assert "onnxscript>=0.5" in err
    code, _, err = hotbed("export", tmp_path / "nowhere", "--no-onnx")
    assert code == 1
    assert "there is no" in err
    assert not (tmp_path / "out").exists()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["user.parquet", "dense.safetensors", "model.py"])
def test_a_full_disk_is_named_whichever_file_it_refuses(deepfm, tmp_path, monkeypatch, hotbed, name):
    copy = shutil.copyfile

    def refuse(source, target, **options):
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return copy(source, target, **options)

    monkeypatch.setattr(shutil, "copyfile", refuse)
    code, _, err = hotbed("export", deepfm, "--no-onnx", "--triton", "--out", tmp_path / "out")
    assert code == ExitCode.DOES_NOT_FIT
    assert f"cannot write {tmp_path / 'out'}: No space left on device. Free some space" in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []
