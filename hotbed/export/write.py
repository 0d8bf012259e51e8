"""A run or a checkpoint in, an export folder out, written atomically (run/export_format.py defines its content)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hotbed.data.dataset import FeatureCounts, read_counts
from hotbed.data.schema import IdFeature, Schema
from hotbed.errors import ConfigError, RunError
from hotbed.export import score
from hotbed.export.onnx_model import OPSET, check_packages, further_labels, input_shapes, write_onnx
from hotbed.export.readme import readme
from hotbed.export.rows import ModelRows, RowOrder, as_float32, order_of_ids, order_of_rows, write_rows
from hotbed.export.source import ExportSource, copy_counts, has_feature, open_source, refuse_memory
from hotbed.files import RemotePath, path_of
from hotbed.files.copies import publish_folder, scratch_folder
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
from hotbed.run.folder import MANIFEST, one_version, read_tensors, write_folder
from hotbed.run.remote_folder import local_copy
from hotbed.scorer.tensors import TensorSpec, inputs_of, outputs_of

_TRITON_MEMORY = "100MB"  # of cached rows, as `hotbed serve` has
Report = Callable[[str, int, int | None], None]  # name, rows done, rows in all


class ExportOptions(NamedTuple):
    """What to export, and how."""

    onnx: bool = True
    rows: RowFormat = "safetensors"
    precision: Precision = "fp32"
    data: str | None = None  # location of the dataset, whose counts order the rows; None: where the run found it
    memory: str | None = None  # for the rows of a checkpoint; None: half of the free memory
    overwrite: bool = False
    triton: bool = False  # also what Triton Inference Server needs to serve the folder


class ExportReport(NamedTuple):
    """What was written."""

    folder: Path
    num_rows: dict[str, int]  # by table
    orders: dict[str, str]  # frequency or id, by table
    num_bytes: int
    source: dict[str, Any]


def export(
    place: str | Path, out: str | Path, wanted: ExportOptions | None = None, report: Report = lambda *_: None
) -> ExportReport:
    """Export a run, or one of its checkpoints, into a folder."""
    place, out, options = local_copy(place), path_of(out), wanted or ExportOptions()
    if isinstance(out, RemotePath):
        return _export_to_store(place, out, options, report)
    _check(out, options)
    with _scratch(out) as scratch, one_version(place) as check:
        source = open_source(place, scratch, options.data, options.memory)
        about: dict[str, Any] = {}

        def fill(new: Path) -> None:
            about.update(_fill(new, source, options, report))
            check()

        write_folder(out, fill)
    tables = about["tables"]
    return ExportReport(
        out,
        {name: one["num_rows"] for name, one in tables.items()},
        {name: one["order"] for name, one in tables.items()},
        sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        source.about,
    )


def _export_to_store(place: Path, out: RemotePath, options: ExportOptions, report: Report) -> ExportReport:
    """Write to a local folder, then copy it, its manifest last."""
    _check(out, options)
    with scratch_folder("exports") as folder:
        done = export(place, folder / (out.name or "export"), options, report)
        publish_folder(done.folder, out, MANIFEST)
    return done._replace(folder=out)


def check_export(place: Path, out: Path, options: ExportOptions) -> None:
    """An error if `export` with these arguments would fail at once; nothing is written."""
    from hotbed.checkpoint.layouts import entries_of

    _check(out, options)
    refuse_memory(place, options.memory)
    if not (place / "model").is_dir():
        entries_of(place)


def default_folder(place: Path) -> Path:
    """RUN/export; for one checkpoint, RUN/export-STEP."""
    if (place / "config.json").is_file():
        return place / "export"
    for run in place.resolve().parents:
        if (run / "config.json").is_file():
            return run / (f"export-{int(place.name)}" if place.name.isdigit() else "export")
    return place.with_name(f"{place.name}-export")


def _check(out: Path, options: ExportOptions) -> None:
    """Check the options and the target before anything is read."""
    for name, value, known in (
        ("row-format", options.rows, ROW_FORMATS),
        ("precision", options.precision, PRECISIONS),
    ):
        if value not in known:
            raise ConfigError(f"--{name} must be one of {', '.join(known)}, not {value!r}.")
    if options.rows == "none" and not options.onnx:
        raise ConfigError("--no-onnx with --row-format none leaves nothing to export; leave one of them out.")
    if options.rows == "none" and options.precision != "fp32":
        raise ConfigError(f"--precision {options.precision} is of the rows, and --row-format none leaves them out.")
    if options.rows == "none" and options.triton:
        raise ConfigError("--triton serves the rows, and --row-format none leaves them out; leave one of the two out.")
    if options.memory is not None:
        parse_bytes(options.memory, "--memory")
    if options.onnx:
        check_packages()
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_export(out):
        raise RunError(f"{out} exists and is not an export. Choose another folder with --out.")
    if not options.overwrite:
        raise RunError(f"{out} already holds an export. --overwrite replaces it, --out DIR writes elsewhere.")


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A temporary folder for the rows of a checkpoint, on the disk of the export."""
    with writing(out):
        folder = out.with_name(f".{out.name}.rows")
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed export
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(new: Path, source: ExportSource, options: ExportOptions, report: Report) -> dict[str, Any]:
    """Write every file but the manifest; returns the content of export.json."""
    schema = Schema.load(source.model)
    for name in ("model.json", "schema.json", "dense.safetensors"):
        shutil.copyfile(source.model / name, new / name)
    copy_counts(source.model, new)
    model = _model(source)
    tasks = further_labels(model, schema.labels) if options.onnx or options.triton else []
    if options.onnx:
        report("model.onnx", 0, 1)
        write_onnx(new / "model.onnx", model, schema.labels)
        report("model.onnx", 1, 1)
    tensors = Tensors.open(source.model / "tables.safetensors")
    tables = {
        name: _write_table(new, one, tensors, source, options, report) for name, (one, *_) in schema.tables.items()
    }
    about = {
        "format_version": FORMAT_VERSION,
        "precision": options.precision,
        "row_format": options.rows,
        "onnx": {"opset": OPSET, "inputs": input_shapes(model), "tasks": tasks} if options.onnx else None,
        "triton": options.triton,
        "source": source.about,
        "tables": tables,
    }
    (new / EXPORT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(score.__file__, new / "score.py")
    if options.triton:
        (new / "1").mkdir()
        shutil.copyfile(Path(__file__).with_name("triton_model.py"), new / "1" / "model.py")
        (new / "config.pbtxt").write_text(triton_config(schema, tasks), encoding="utf-8")
    (new / "README.md").write_text(readme(schema, source.card, about), encoding="utf-8")
    return about


def triton_config(schema: Schema, tasks: Sequence[str]) -> str:
    """config.pbtxt, with an output for the label and for each of the further ones; the model has the name of its folder."""
    kinds = {"BYTES": "TYPE_STRING", "INT64": "TYPE_INT64", "FP64": "TYPE_FP64"}

    def tensor(one: TensorSpec) -> str:
        return f"  {{ name: {json.dumps(one.name)}, data_type: {kinds[one.datatype]}, dims: {list(one.shape)} }}"

    inputs = ",\n".join(map(tensor, inputs_of(schema)))
    outputs = ",\n".join(map(tensor, outputs_of([schema.label, *tasks])))
    return (
        f'backend: "python"\nmax_batch_size: 0\ninput [\n{inputs}\n]\noutput [\n{outputs}\n]\n'
        f'parameters {{ key: "memory", value: {{ string_value: "{_TRITON_MEMORY}" }} }}\n'
        "instance_group [ { kind: KIND_CPU } ]\n"
    )


def _model(source: ExportSource) -> Model:
    model = rebuild_model(source.card["model"])
    try:
        model.load_state_dict(read_tensors(source.model / "dense.safetensors"))
    except RuntimeError as error:
        raise RunError(f"the dense weights of {source.model} do not fit the model: {error}") from error
    return model.eval()


def _write_table(
    new: Path, feature: IdFeature, tensors: Tensors, source: ExportSource, options: ExportOptions, report: Report
) -> dict[str, Any]:
    """Write the rows of a feature's table; returns its entry in export.json."""
    name, card = feature.table, source.card["tables"][feature.table]
    if f"{name}.weight" not in tensors.places:
        raise RunError(f"{source.model} is damaged: it has no rows of table {name!r}.")
    row_order = RowOrder("id", None) if options.rows == "none" else _row_order(feature, card, tensors, source)
    rows = ModelRows(tensors, name, row_order)
    shared = f"{name}.shared"
    said = {
        "file": "",
        "num_rows": rows.num_rows,
        "dim": rows.dim,
        "pooling": card["pooling"],
        "rows": card["rows"],
        "hashing": card["hashing"],
        "order": row_order.order,
        "id_is_position": rows.id_is_position,
        "shared": as_float32(tensors.map(shared), tensors.places[shared][0])[0].tolist()
        if shared in tensors.places
        else None,
    }
    if options.rows != "none":
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done += more
            report(name, done, rows.num_rows)

        (new / "rows").mkdir(exist_ok=True)
        path = write_rows(new / "rows" / name, rows, options.precision, options.rows, count)
        said["file"] = str(path.relative_to(new))
    return said


def _row_order(feature: IdFeature, card: dict[str, Any], tensors: Tensors, source: ExportSource) -> RowOrder:
    if card["rows"] is not None:
        counts = None if feature.mode == "vocabulary" else _counts(feature, source)
        return order_of_rows(feature, card["rows"], card["hashing"], counts)
    return order_of_ids(feature, tensors.map(f"{feature.table}.id"), _counts(feature, source))


def _counts(feature: IdFeature, source: ExportSource) -> FeatureCounts | None:
    """How often ids occurred: from the model for a vocabulary, else from its dataset."""
    if feature.mode == "vocabulary":
        return read_counts(source.model / "counts" / f"{feature.table}.parquet")
    dataset = source.dataset
    if dataset is None or not has_feature(dataset, feature):
        return None
    path = dataset.path / "counts" / f"{feature.table}.parquet"
    return read_counts(path) if path.is_file() else None
