"""Power is lost while a model folder, an export or a small file is replaced: the old one or the new one is there, whole."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hotbed.export import ExportOptions, export
from hotbed.host import atomic
from hotbed.run.export_format import read_export
from hotbed.run.folder import (
    CONTENT,
    check_folder,
    check_free,
    make_run,
    recover_folder,
    write_folder,
    write_tensors,
    write_text,
)
from tests.export.conftest import clicks, train  # noqa: F401
from tests.power.record import Recorder
from tests.power.replay import replay


def either(said):
    return {"new"} if said else {"old", "new"}


@pytest.fixture(params=["exchange", "two renames"])
def swap(request, monkeypatch):
    """How the file system lets a folder take the place of another one."""
    if request.param == "two renames":
        monkeypatch.setattr(atomic, "exchange", lambda *_: False)
    return request.param


def fill_with(text):
    def fill(new):
        write_tensors(
            new / "dense.safetensors", {"text": torch.frombuffer(bytearray(text * 500, "utf8"), dtype=torch.uint8)}
        )
        (new / "model.json").write_text(json.dumps(text))
        (new / "counts").mkdir()
        pq.write_table(pa.table({"id": [text] * 99}), new / "counts" / "user.parquet")
        shutil.copyfile(new / "counts" / "user.parquet", new / "counts" / "ad.parquet")

    return fill


def opened(folder):
    recover_folder(folder)
    if not folder.exists():
        return "old"  # there was none
    check_folder(folder)
    return json.loads((folder / "model.json").read_text())


def test_a_model_folder_is_replaced(disk, room, swap):
    folder = disk / "run" / "model"
    write_folder(folder, fill_with("old"))
    with Recorder(disk) as recorder:
        write_folder(folder, fill_with("new"))
        recorder.mark("new")
    replay(f"model folder: replaced, {swap}", recorder, room, lambda left: opened(left / "run/model"), either)


def test_the_first_model_folder(disk, room):
    with Recorder(disk) as recorder:
        write_folder(disk / "run" / "best" / "7", fill_with("new"))
        recorder.mark("new")
    replay("model folder: first", recorder, room, lambda left: opened(left / "run/best/7"), either)


def test_a_small_file_is_replaced(disk, room):
    write_text(disk / "config.json", "old")
    with Recorder(disk) as recorder:
        write_text(disk / "config.json", "new")
        recorder.mark("new")
    replay("small file", recorder, room, lambda left: (left / "config.json").read_text(), either)


def test_an_export_is_replaced(disk, room, tmp_path, clicks, swap):  # noqa: F811
    run = train(tmp_path / "run", clicks, "dnn", "model.options.hidden=[8]")
    export(run, disk / "export", ExportOptions(onnx=False, precision="fp16"))
    with Recorder(disk) as recorder:
        export(run, disk / "export", ExportOptions(onnx=False, overwrite=True))
        recorder.mark("new")

    def found(left):
        return {"fp16": "old", "fp32": "new"}[read_export(left / "export", every_byte=True).precision]

    replay(f"export: replaced, {swap}", recorder, room, found, either)


def test_a_run_that_is_overwritten(disk, room):
    """Whatever is left of the old one, --overwrite takes the folder."""
    run = disk / "run"
    run.mkdir()
    for name in CONTENT:
        if name.endswith("json") or name.endswith("jsonl") or name.endswith("html"):
            (run / name).write_text(name)
        else:
            write_folder(run / name, fill_with("old"))
    with Recorder(disk) as recorder:
        make_run(run, overwrite=True)

    def found(left):
        check_free(left / "run", overwrite=True)
        return "free"

    replay("run folder: overwritten", recorder, room, found, lambda _: {"free"})
