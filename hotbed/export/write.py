"""A run or a checkpoint in, an export folder out, whole or not at all (run/export_format.py says what is in it)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hotbed.data.dataset import Counts, read_counts
from hotbed.data.schema import IdFeature, Schema
from hotbed.errors import ConfigError, RunError
from hotbed.export import score
from hotbed.export.onnx_model import OPSET, check_packages, input_shapes, write_onnx
from hotbed.export.readme import readme
from hotbed.export.rows import Heat, ModelRows, as_float32, heat_of_ids, heat_of_rows, write_rows
from hotbed.export.source import Source, has_feature, open_source
from hotbed.host.atomic import writing
from hotbed.host.memory import parse_bytes
from hotbed.models import Model, rebuild_model
from hotbed.run.export_format import (
    EXPORT,
    FORMAT_VERSION,
    PRECISIONS,
    ROW_FORMATS,
    Precision,
    RowFormat,
    Tensors,
    is_export,
)
from hotbed.run.files import read_tensors, write_folder

Report = Callable[[str, int, int | None], None]  # name, rows done, rows in all


class Wanted(NamedTuple):
    """What an export shall hold."""

    onnx: bool = True
    rows: RowFormat = "safetensors"
    precision: Precision = "fp32"
    data: str | None = None  # where the dataset is, whose counts order the rows; None: where the run found it
    memory: str | None = None  # for the rows of a checkpoint; None: half of what is free
    overwrite: bool = False


class Exported(NamedTuple):
    """What was written."""

    folder: Path
    num_rows: dict[str, int]  # by table
    orders: dict[str, str]  # frequency or id, by table
    num_bytes: int
    source: dict[str, Any]


def export(
    place: str | Path, out: str | Path, wanted: Wanted | None = None, report: Report = lambda *_: None
) -> Exported:
    """Export a run, or one of its checkpoints, into a folder."""
    place, out, wanted = Path(place), Path(out), wanted or Wanted()
    _check(out, wanted)
    with _scratch(out) as scratch:
        source = open_source(place, scratch, wanted.data, wanted.memory)
        about: dict[str, Any] = {}
        write_folder(out, lambda new: about.update(_fill(new, source, wanted, report)))
    tables = about["tables"]
    return Exported(
        out,
        {name: one["num_rows"] for name, one in tables.items()},
        {name: one["order"] for name, one in tables.items()},
        sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        source.about,
    )


def default_folder(place: Path) -> Path:
    """RUN/export; of one checkpoint RUN/export-STEP."""
    if (place / "config.json").is_file():
        return place / "export"
    for run in place.resolve().parents:
        if (run / "config.json").is_file():
            return run / (f"export-{int(place.name)}" if place.name.isdigit() else "export")
    return place.with_name(f"{place.name}-export")


def _check(out: Path, wanted: Wanted) -> None:
    """What can be known before anything is read."""
    for name, value, known in (
        ("rows", wanted.rows, ROW_FORMATS),
        ("precision", wanted.precision, PRECISIONS),
    ):
        if value not in known:
            raise ConfigError(f"--{name} must be one of {', '.join(known)}, not {value!r}.")
    if wanted.rows == "none" and not wanted.onnx:
        raise ConfigError("--no-onnx with --rows none leaves nothing to export; leave one of them out.")
    if wanted.memory is not None:
        parse_bytes(wanted.memory, "--memory")
    if wanted.onnx:
        check_packages()
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_export(out):
        raise RunError(f"{out} is there already and holds no export. Choose another folder with --out.")
    if not wanted.overwrite:
        raise RunError(f"{out} already holds an export. --overwrite replaces it, --out DIR writes elsewhere.")


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """Room for the rows of a checkpoint, on the disk that the export goes to."""
    with writing(out):
        folder = out.with_name(f".{out.name}.rows")
        shutil.rmtree(folder, ignore_errors=True)  # of an export that was killed
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(new: Path, source: Source, wanted: Wanted, report: Report) -> dict[str, Any]:
    """Write every file but the manifest; what export.json says."""
    schema = Schema.load(source.model)
    for name in ("model.json", "schema.json", "dense.safetensors"):
        shutil.copyfile(source.model / name, new / name)
    shutil.copytree(source.model / "counts", new / "counts")
    model = _model(source)
    if wanted.onnx:
        report("model.onnx", 0, 1)
        write_onnx(new / "model.onnx", model)
        report("model.onnx", 1, 1)
    tensors = Tensors.open(source.model / "tables.safetensors")
    tables = {one.name: _write_table(new, one, tensors, source, wanted, report) for one in schema.features}
    about = {
        "format_version": FORMAT_VERSION,
        "precision": wanted.precision,
        "row_format": wanted.rows,
        "onnx": {"opset": OPSET, "inputs": input_shapes(model)} if wanted.onnx else None,
        "source": source.about,
        "tables": tables,
    }
    (new / EXPORT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(score.__file__, new / "score.py")
    (new / "README.md").write_text(readme(schema, source.card, about), encoding="utf-8")
    return about


def _model(source: Source) -> Model:
    model = rebuild_model(source.card["model"])
    try:
        model.load_state_dict(read_tensors(source.model / "dense.safetensors"))
    except RuntimeError as error:
        raise RunError(f"the dense weights of {source.model} do not fit the model: {error}") from error
    return model.eval()


def _write_table(
    new: Path, feature: IdFeature, tensors: Tensors, source: Source, wanted: Wanted, report: Report
) -> dict[str, Any]:
    """The rows of one table; what export.json says of it."""
    name, card = feature.name, source.card["tables"][feature.name]
    if f"{name}.weight" not in tensors.places:
        raise RunError(f"{source.model} is damaged: it holds no rows of table {name!r}.")
    heat = Heat("id", None) if wanted.rows == "none" else _heat(feature, card, tensors, source)
    rows = ModelRows(tensors, name, heat)
    shared = f"{name}.shared"
    said = {
        "file": "",
        "num_rows": rows.num_rows,
        "dim": rows.dim,
        "pooling": card["pooling"],
        "rows": card["rows"],
        "hashing": card["hashing"],
        "order": heat.order,
        "id_is_position": rows.id_is_position,
        "shared": as_float32(tensors.map(shared), tensors.places[shared][0])[0].tolist()
        if shared in tensors.places
        else None,
    }
    if wanted.rows != "none":
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done += more
            report(name, done, rows.num_rows)

        (new / "rows").mkdir(exist_ok=True)
        path = write_rows(new / "rows" / name, rows, wanted.precision, wanted.rows, count)
        said["file"] = str(path.relative_to(new))
    return said


def _heat(feature: IdFeature, card: dict[str, Any], tensors: Tensors, source: Source) -> Heat:
    if card["rows"] is not None:
        counts = None if feature.mode == "vocabulary" else _counts(feature, source)
        return heat_of_rows(feature, card["rows"], card["hashing"], counts)
    return heat_of_ids(feature, tensors.map(f"{feature.name}.id"), _counts(feature, source))


def _counts(feature: IdFeature, source: Source) -> Counts | None:
    """How often ids were seen: as the model knows it, of a vocabulary, else as its dataset does."""
    if feature.mode == "vocabulary":
        return read_counts(source.model / "counts" / f"{feature.name}.parquet")
    dataset = source.dataset
    if dataset is None or not has_feature(dataset, feature):
        return None
    path = dataset.path / "counts" / f"{feature.name}.parquet"
    return read_counts(path) if path.is_file() else None
